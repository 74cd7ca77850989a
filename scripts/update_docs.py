"""Fill in the blocks of the pages and of the slides: outputs, excerpts, diffs, tables, links.

A block stands between two marks, <!-- begin KIND ... --> and <!-- end -->. scripts/docs/blocks.py
says which kinds there are.

Usage: scripts/update_docs.py              fill in all blocks
       scripts/update_docs.py --check      change nothing; exit status 1 if something is stale
       scripts/update_docs.py --record     run every lesson as run_course.sh would, and write what
                                           they printed into tests/records, into the file of this
                                           kind of machine. The pages show that of 2 CPU cores
       scripts/update_docs.py --record 8   run these lessons only, and keep the others
       scripts/update_docs.py --faults     run all tests of faults and fill in what they saw
"""

import argparse
import os
import subprocess
import sys
import tempfile

from course import machine
from course.lists import ROOT, read_course, read_days, read_exercises, read_pages
from course.run_lesson import command_of, run
from docs import recordings
from docs.blocks import Course, fill
from docs.pages import DECKS, PAGES
from launcher.processes import exit_with

FAULTS = "python scripts/update_docs.py --faults"


def by_id(tables):
    """Return {id: table} of a list."""
    return {x["id"]: x for x in tables}


def record(chosen, lessons):
    """Run the chosen lessons and put what they printed into the record of this kind of machine.

    Return the lessons that failed, {id: why}.
    """
    results, notes, failed = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for lesson in chosen:
            print(f"recording lesson {lesson['id']}", flush=True)
            results[lesson["id"]] = run(lesson, cwd=folder)
    # Only now: asking torch for the GPUs takes memory of theirs.
    where = machine.recorded("").strip().partition("``: ")[2].removesuffix(".")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    where += f", {nodes} nodes" if nodes > 1 else ""
    for name, result in results.items():
        if result["problem"]:
            failed[name] = result["problem"]
        elif result["skipped"]:
            print(f"lesson {name} is not recorded: {result['skipped']}")
        else:
            program, arguments = command_of(lessons[name])
            command = " ".join([program, *arguments])
            notes[name] = recordings.note(command, result, where, folder)
    if notes:
        path = recordings.write_record(where, notes, lessons)
        print(f"record: {path.relative_to(ROOT)}")
    return failed


def record_faults():
    """Run all tests of faults; return what they saw, as docs.recordings.read_faults."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "", "tests/faults"]
        env = {**os.environ, "FAULTS_TO": folder}
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            sys.exit("A test of faults failed, so the table stays as it is.")
        return recordings.read_faults(folder)


def update(course, check):
    """Fill in the blocks of all pages, then of the decks; return the files that were stale."""
    stale = []
    for file in [*PAGES, *DECKS]:
        old = (ROOT / file).read_text()
        new = fill(old, file, course)
        if new != old:
            stale.append(file)
            if not check:
                (ROOT / file).write_text(new)
    return stale


def main():
    """Update or check all pages and decks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    parser.add_argument("--record", nargs="*", metavar="ID", help="run lessons, take their output")
    parser.add_argument("--faults", action="store_true", help="run tests/faults, take what it saw")
    args = parser.parse_args()
    lessons, failed = by_id(read_course()), {}
    unknown = set(args.record or []) - set(lessons)
    if unknown:
        parser.error(f"There is no lesson {', '.join(sorted(unknown))}.")
    if args.record is not None:
        failed = record([lessons[name] for name in args.record or lessons], lessons)
    lists = lessons, read_pages(), by_id(read_exercises()), by_id(read_days())
    course = Course(*lists, recordings.read_records())
    if args.faults:
        course.faults, course.faults_recorded = record_faults(), machine.recorded(FAULTS)
    try:
        stale = update(course, args.check)
    except ValueError as error:
        sys.exit(str(error))
    if args.check and stale:
        print(f"Stale: {', '.join(stale)}. Run: python scripts/update_docs.py")
        return 1
    decks = [file for file in stale if file in DECKS]
    if decks:
        print(f"Changed: {', '.join(decks)}. For the PDFs, run: slides/build.sh")
    for name, problem in failed.items():
        print(f"Lesson {name} failed and is not in the record: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
