"""Fill in the blocks of the pages and of the slides: outputs, excerpts, diffs, tables, links.

A block is what is between two marks, <!-- begin KIND ... --> and <!-- end -->.
scripts/docs/blocks.py says which kinds there are.

Usage: scripts/update_docs.py              fill in all blocks
       scripts/update_docs.py --check      change nothing; exit status 1 if something is stale
       scripts/update_docs.py --record     run every lesson as run_course.sh would, and write what
                                           they printed into data/records, into the file of this
                                           kind of machine. The pages show the one of 2 CPU cores
       scripts/update_docs.py --record 8   run only these lessons, and keep the other records.
                                           6.wrong is 6 with the wrong line of variants.toml
       scripts/update_docs.py --faults     run all tests of faults and fill in what they saw
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import system_info
from catalog import ROOT, write_variant
from docs import records
from docs.blocks import Course, fill
from docs.pages import DECKS, PAGES, PLAY
from processes import exit_with
from runner.run_lesson import lesson_command, run


def kind_of_machine():
    """Return (the name of this kind of machine, such as 2-nodes-4-nvidia-a100, a line on it)."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    more = [f"{nodes} nodes"] if nodes > 1 else []
    gpus = system_info.gpus()
    device = f"{system_info.cores()} CPU cores" if gpus == "no GPU" else gpus.replace(" x ", " ")
    kind = re.sub(r"[^a-z0-9]+", "-", " ".join([*more, device]).lower())
    return kind, system_info.described(*more)


def run_wrong(lesson, cwd):
    """Run a lesson with its wrong line, which it must call WRONG. Return the result until then."""
    own = tempfile.mkdtemp(dir=cwd)  # the curves of the right one are not there
    file = write_variant(own, lesson["file"], *lesson["wrong"])
    result = run({**lesson, "file": file}, cwd=own)
    result["output"] = result["output"].partition("=> ")[0] + result["showed"]
    right = result["problem"] == "WRONG" or result["skipped"]
    return {**result, "problem": "" if right else "it is not WRONG"}


def record(chosen, lessons):
    """Run the chosen lessons and keep what they printed. Return how many failed."""
    results, notes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            print(f"recording lesson {name}", flush=True)
            run_it = run_wrong if "wrong" in lessons[name] else run
            results[name] = run_it(lessons[name], cwd=folder)
        # Only now: asking torch for the GPUs takes some of their memory.
        kind, line = kind_of_machine()
        for name, result in results.items():
            if trouble := result["problem"] or result["skipped"]:
                print(f"Lesson {name} is not in the record: {trouble}", file=sys.stderr)
                continue
            program, arguments = lesson_command(lessons[name])
            command = " ".join([program, *arguments])
            notes[name] = records.note(command, result, line, folder)
            if name in records.CURVES:
                runs = Path(folder, "runs", Path(lessons[name]["file"]).stem)
                notes[name]["curves"] = records.curves(runs)
    if notes:
        print(f"record: {records.write_record(kind, notes)}")
    return sum(bool(result["problem"]) for result in results.values())


def record_faults():
    """Run all tests of faults; return the table of what they saw."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "", "tests/faults"]
        env = {**os.environ, "FAULTS_TO": folder}
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            sys.exit("A test of faults failed, so the table stays as it is.")
        line = system_info.recorded("python scripts/update_docs.py --faults")
        return f"{line}\n{records.table_of_faults(folder)}"


def main():
    course = Course()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", nargs="*", metavar="ID", choices=course.runs)
    parser.add_argument("--faults", action="store_true")
    args = parser.parse_args()
    failed = 0
    if args.record is not None:
        usual = course.lessons if "SLURM_JOB_ID" in os.environ else course.runs  # all for 2x2 ranks
        failed = record(args.record or usual, course.runs)
        course = Course()
    if args.faults:
        course.faults = record_faults()
    stale = []
    for page in [*PAGES, *DECKS, PLAY]:
        old = (ROOT / page).read_text()
        try:
            new = fill(old, page, course)
        except ValueError as error:
            sys.exit(str(error))
        if new != old:
            stale.append(page)
            if not args.check:
                (ROOT / page).write_text(new)
    if args.check and stale:
        print(f"Stale: {', '.join(stale)}. Run: python scripts/update_docs.py")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
