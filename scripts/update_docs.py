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
       scripts/update_docs.py --stamp      run what has changed since it was recorded. If it shows
                                           the same, its record stays, and is of today's code;
                                           --stamp 8 for these lessons only
       scripts/update_docs.py --faults     run all tests of faults and fill in what they saw
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import records
import system_info
from catalog import ROOT, write_variant
from docs import blocks, notebook
from docs.blocks import Course
from docs.pages import DECKS, PAGES, PLAY, SITE
from processes import exit_with
from runner.run_lesson import lesson_command, run_lesson

UPDATE = "python scripts/update_docs.py"
STAMP = f"taskset -c 0,1 {UPDATE} --stamp"


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
    file = write_variant(own, lesson["file"], *lesson["change"])
    result = run_lesson({**lesson, "file": file}, cwd=own)
    result["output"] = result["output"].partition("=> ")[0] + result["showed"]
    right = result["problem"] == "WRONG" or result["skipped"]
    return {**result, "problem": "" if right else "it is not WRONG"}


def record(chosen, course, stamp):
    """Run what is chosen and keep what it printed. Return the names of those that failed.

    stamp: keep the old note where the new one shows the same, and refuse the new one otherwise
    """
    # A process of its own, because asking torch for the GPUs takes some of their memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        kind, machine = pool.apply(kind_of_machine)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            print(f"recording lesson {name}", flush=True)
            lesson, old = course.runs[name], course.records.get(kind, {}).get(name)
            result = (run_wrong if "change" in lesson else run_lesson)(lesson, cwd=folder)
            command = " ".join([lesson_command(lesson)[0], *lesson_command(lesson)[1]])
            code = records.digest(lesson, course.runs)
            new = records.make_note(command, result, machine, folder, code)
            trouble = result["problem"] or result["skipped"]
            if stamp and not trouble:
                trouble = f"{kind} has none"
                if old:
                    trouble = records.difference(old["output"], new["output"])
                    new = old | {"code": code}
            elif name in course.lessons and lesson.get("figure") in ("chain", "rates"):
                runs = Path(folder, "runs", Path(lesson["file"]).stem)
                new["curves"] = records.curves(runs)
            if trouble:
                print(f"The record of {name} stays as it is: {trouble}", file=sys.stderr)
                failed += [name] * (not result["skipped"])
            else:
                print(f"record: {records.write_note(kind, name, new)}", flush=True)
    if failed and stamp:
        print(f"To record what they show now: {UPDATE} --record {' '.join(failed)}")
    return failed


def record_faults():
    """Run all tests of faults; return the table of what they saw."""
    with tempfile.TemporaryDirectory() as folder:
        # The tests of a file one after the other, so the rows are in their order.
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", ""]
        env = {**os.environ, "FAULTS_TO": folder}
        if subprocess.run([*command, "tests/faults"], cwd=ROOT, env=env).returncode:
            sys.exit("A test of faults failed, so the table stays as it is.")
        when = f"Recorded on {time.strftime('%Y-%m-%d')} with `{UPDATE} --faults`"
        lines = [f"{when}: {system_info.described()}.\n"]
        lines += ["\n| fault | what you will see | seconds | what to do |\n|---|---|---|---|\n"]
        for area in ("processes", "data", "use"):
            lines += [f"| **{area}** |  |  |  |\n", Path(folder, area).read_text()]
        return "".join(lines)


def main():
    course = Course()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", nargs="*", metavar="ID", choices=course.runs)
    parser.add_argument("--stamp", nargs="*", metavar="ID", choices=course.runs)
    parser.add_argument("--faults", action="store_true")
    args = parser.parse_args()
    failed = []
    old = records.stale(course.records[records.SHOWN], course.runs)
    if args.stamp is not None:
        failed = record(args.stamp or old, course, stamp=True)
        course = Course()
    if args.record is not None:
        usual = course.lessons if "SLURM_JOB_ID" in os.environ else course.runs  # all for 2x2 ranks
        failed = record(args.record or usual, course, stamp=False)
        course = Course()
    if args.faults:
        course.faults = record_faults()
    stale = []
    for page in [*PAGES, *DECKS, PLAY, SITE, notebook.NOTEBOOK]:
        text = (ROOT / page).read_text()
        try:
            fill = notebook.fill if page == notebook.NOTEBOOK else blocks.fill
            new = fill(text, page, course)
        except ValueError as error:
            sys.exit(str(error))
        if new != text:
            stale.append(page)
            if not args.check:
                (ROOT / page).write_text(new)
    if stale and args.check:
        print(f"Stale pages: {', '.join(stale)}. Run: {UPDATE}")
    if old and args.check:
        print(f"Of other code, or not recorded: {', '.join(old)}. Run: {STAMP}")
    return 1 if failed or (args.check and (stale or old)) else 0


if __name__ == "__main__":
    exit_with(main)
