"""Run the lessons of scripts/course.toml, print what each of them showed and write a report.

Called by run_course.sh, which takes care of the environment. The exit status is 0 if every lesson
ended well and printed its proof line, 1 if one did not or the report could not be written, 2 for a
wrong argument, 130 after Ctrl-C.

A lesson that this machine or this version of PyTorch can't run says why in its last line on stdout,
and exits with status 69 (os.EX_UNAVAILABLE). It's skipped, which is no failure.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages beside this one

from catalog import read_lessons
from processes import exit_with
from progress import SignOfLife
from runner.run_lesson import lesson_command, run_lesson, summary

REPORT = Path("runs", "report.html")  # where the lessons put their curves


def choose(lessons, wanted, parser):
    """Return the lessons that were named by id or day; all lessons if none was."""
    names_of = {x["id"]: {x["id"], x["file"].partition("/")[0]} for x in lessons}
    for name in set(wanted).difference(*names_of.values()):
        known = ", ".join(names_of)
        parser.error(f"There is no lesson {name!r}. There are day1, day2 and {known}.")
    return [x for x in lessons if not wanted or names_of[x["id"]] & set(wanted)]


def files():
    """Return the lessons' TensorBoard files."""
    return set(Path().glob("runs/**/events.out.tfevents.*"))


def run_all(lessons):
    """Run these lessons, one after the other; return what the report needs of each."""
    results = []
    for number, lesson in enumerate(lessons, 1):
        program, arguments = lesson_command(lesson)
        command = shlex.join([program, *arguments])
        print(f"\n[{number}/{len(lessons)}] {lesson['idea']}\n   $ {command}", flush=True)
        before = files()
        known = {key: lesson.get(key) for key in ("id", "idea", "figure")}
        result = known | run_lesson(lesson)
        results.append({**result, "files": sorted(files() - before)})
    return results


def print_table(results):
    """Print what each lesson showed, and how many ended well."""
    wide = max(len("lesson"), *(len(x["id"]) for x in results))
    width = max(len("what it showed"), *(len(x["showed"]) for x in results))
    print(f"\n{'lesson':>{wide}}  {'what it showed':<{width}}  {'seconds':>7}")
    for x in results:
        state = x["problem"] or (f"skipped: {x['skipped']}" if x["skipped"] else "ok")
        print(f"{x['id']:>{wide}}  {x['showed']:<{width}}  {x['seconds']:7.1f}  {state}")
    print(f"\n{summary(results)}", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="run_course.sh", description=__doc__.splitlines()[0])
    parser.add_argument("lesson", nargs="*", help="lesson ids, day1 or day2; all if none is given")
    parser.add_argument("--list", action="store_true", help="show the lessons and run nothing")
    args = parser.parse_args()
    lessons = choose(read_lessons(), args.lesson, parser)
    if args.list:
        for x in lessons:
            print(f"{x['id']:>12}  {x['file']:<38} {x['idea']}")
        return 0
    if not os.access(".", os.W_OK):
        where = f"You cannot write to {Path.cwd()}, but the lessons write to the current folder."
        sys.exit(f"{where} Go to a folder of your own, such as your clone of the course.")
    print("Each lesson first imports torch, which takes several seconds the first time.")
    results = run_all(lessons)
    print_table(results)
    print("Now the report.", flush=True)
    try:
        with SignOfLife():
            from runner.report import write  # here, because what it imports takes seconds to load

            write(REPORT, results, shlex.join(["scripts/run_course.sh", *sys.argv[1:]]))
    except OSError as error:
        sys.exit(f"The report could not be written: {error}")
    print(f"report: {REPORT}")
    return 1 if any(x["problem"] for x in results) else 0


if __name__ == "__main__":
    exit_with(main)
