"""Fill in the made parts of the pages: outputs, excerpts, diffs, tables, ways to the next page.

A made part stands between two lines. The first says what belongs there, the second ends it:

    <!-- begin head 4 -->           the ways to the pages before and after; minutes, script, slides
    <!-- begin foot 4 -->           the ways again, at the end. Or a file: foot day2/NODES.md
    <!-- begin code 4 train -->     a function, or a method: Class.method
    <!-- begin code 4 train "a" "b" -->  in it, from the first line that begins with a to the next
                                     that begins with b
    <!-- begin output 4 -->          what the lesson printed when it was last recorded, folded
    <!-- begin diff 4 6 -->          what a lesson changes above its ruler
    <!-- begin exercises 4 -->       the exercises of a lesson
    <!-- begin exercise_list day1 -->  those of a day
    <!-- begin lessons day1 -->      the pages of a day (day1, day2, beyond), from course.toml;
                                     lessons day1 short: without their exercises
    <!-- begin timetable day1 -->    when what is done in a class, from course.toml
    <!-- begin measured -->          what each lesson showed on each kind of machine, from
                                     tests/records
    <!-- begin faults -->            what the tests of tests/faults saw when they were last recorded
    <!-- begin works -->             the versions it was tested with, from tests/works_with.json
    <!-- begin gpu -->               a row for each record of tests/on_gpu.py, in tests/records
    <!-- begin devices day1 -->      which device and backend a day's lessons choose, and where
    <!-- end -->

Usage: scripts/update_docs.py              fill in tables and diffs
       scripts/update_docs.py --check      change nothing; exit status 1 if something is stale
       scripts/update_docs.py --record     run every lesson as run_course.sh would, and write what
                                           they printed into tests/records, into the file of this
                                           kind of machine. The pages show that of 2 CPU cores
       scripts/update_docs.py --record 8   run these lessons only, and keep the others
       scripts/update_docs.py --faults     run the tests of faults and fill in what they saw
       scripts/update_docs.py --works-with take what run_tests.sh --torch has recorded in
                                           runs/works_with/ into tests/works_with.json, and its
                                           packages into tests/constraints.txt
       scripts/update_docs.py --devices    ask the lessons, by tests/gpu, and fill in the tables

In a page of a lesson, each word of the glossary is a link where it is first used: those that are
missing are put in, too.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from course.lists import ROOT, read_course, read_exercises, read_pages
from docs.excerpts import code, diff
from docs.glossary import link_terms
from docs.pages import PAGES, PART, exercise_table, exercises_of, head, lesson_table, timetable, ways
from launcher.processes import exit_with
from docs.recordings import (
    device_table,
    fault_table,
    folded,
    gpu_table,
    measured,
    outputs,
    record,
    record_faults,
    take_records,
    works_with,
)


def fill(text, page, seen, devices=False):
    """Return a page's text with its made parts filled in.

    seen, of the faults, is None to leave that table be. devices says whether the tables of devices
    are made again.
    """
    lessons = {x["id"]: x for x in read_course()}
    pages, exercises, recorded = read_pages(), read_exercises(), outputs()

    def part(match):
        begin, kind, words, old, end = match.groups()
        try:
            return begin + made(kind, shlex.split(words), old) + end
        except (KeyError, IndexError, StopIteration):
            sys.exit(f"{page}: there is nothing (any more) for {begin.strip()}")

    def made(kind, words, old):
        if kind == "head":
            new = head(words[0], pages)
        elif kind == "foot":
            new = ways(words[0], pages)
        elif kind == "code":
            new = code(lessons[words[0]], words[1:])
        elif kind == "output":
            new = folded(recorded[words[0]]) if words[0] in recorded else old
        elif kind == "diff":
            new = diff(lessons[words[0]], lessons[words[1]])
        elif kind == "exercises":
            new = exercises_of(words[0], page, exercises)
        elif kind == "exercise_list":
            chosen = [x for x in exercises if x["file"].startswith(f"{words[0]}/")]
            new = exercise_table(chosen, page)
        elif kind == "lessons":
            new = lesson_table(words[0], page, pages, [] if "short" in words else exercises)
        elif kind == "timetable":
            new = timetable(words[0], page, pages, exercises)
        elif kind == "measured":
            new = measured()
        elif kind == "faults":
            new = fault_table(seen) if seen else old
        elif kind == "works":
            new = works_with()
        elif kind == "gpu":
            new = gpu_table()
        elif kind == "devices":
            new = device_table(words[0]) if devices else old
        else:
            sys.exit(f"{page}: there is no made part of the kind {kind!r}.")
        return new

    return PART.sub(part, text)


def main():
    """Update or check all pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    parser.add_argument("--record", nargs="*", metavar="ID", help="run lessons, take their output")
    parser.add_argument("--faults", action="store_true", help="run tests/faults, take what it saw")
    parser.add_argument("--works-with", action="store_true", help="take runs/works_with/ in")
    parser.add_argument("--devices", action="store_true", help="ask which devices lessons choose")
    args = parser.parse_args()
    if args.works_with:
        try:
            take_records()
        except FileNotFoundError as error:
            sys.exit(str(error))
    lessons, seen, failed = read_course(), None, {}
    unknown = set(args.record or []) - {x["id"] for x in lessons}
    if unknown:
        parser.error(f"There is no lesson {', '.join(sorted(unknown))}.")
    if args.faults:
        with tempfile.TemporaryDirectory() as folder:
            seen = record_faults(Path(folder, "faults"))
    if args.record is not None:
        try:
            path, failed = record([x for x in lessons if x["id"] in args.record or not args.record])
        except ValueError as error:
            sys.exit(str(error))
        if path.exists():
            print(f"record: {path.relative_to(ROOT)}")
    stale = []
    of_lessons = {x["file"] for x in read_pages()}

    def update(file, change):
        path = ROOT / file
        old = path.read_text()
        new = change(old)
        if new != old:
            stale.append(file)
            if not args.check:
                path.write_text(new)

    for page in PAGES:

        def change(text, page=page):
            text = fill(text, page, seen, args.devices)
            return link_terms(text, page) if page in of_lessons else text

        update(page, change)
    if args.check and stale:
        print(f"Stale: {', '.join(stale)}. Run: python scripts/update_docs.py")
        return 1
    for name, problem in failed.items():
        print(f"Lesson {name} failed and is not in the record: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
