"""Check an exercise: start it on its ranks and see what each of them really does.

A check says what was measured on each rank and what is allowed: symptoms, no causes. --hint gives
the next of three hints and runs nothing. Once an exercise has passed, it says what was wrong.

Without an id: list the exercises and which of them have passed. With a lesson, such as 4: list its
exercises. With next: check the first one that has not passed yet. What has passed is remembered in
runs/exercises.json.

What a check looks at is in exercises/, one file for each exercise. The list of the exercises, with
their hints, is exercises.toml. Reading it there takes the fun out of it: ask with --hint.
"""

import argparse
import importlib.util
import re
import sys

from course.lists import ROOT, read_exercises
from exercises import records, running
from launcher.processes import exit_with


def state_of(exercise, record):
    """Return passed, not yet, or - for an exercise that was changed since it was checked."""
    known = record.get(exercise["id"], {})
    same = known.get("digest") == records.digest(ROOT / exercise["file"])
    return known.get("state", "-") if same else "-"


def not_passed(exercises, record):
    """Return the exercises that have not passed yet."""
    return [x for x in exercises.values() if state_of(x, record) != "passed"]


def list_exercises(exercises, record):
    """Print these exercises, with what is known of them."""
    for exercise in exercises:
        state = state_of(exercise, record)
        print(f"{exercise['id']:>5}  {state:8}  {exercise['kind']:15} {exercise['file']}")
    command = f"python scripts/check.py {exercises[0]['id']}"
    print(f"Check one: {command}      A hint: {command} --hint")
    print("The first that has not passed yet: python scripts/check.py next")


def give_hint(exercise, record):
    """Print the next hint, and remember it; after the last one the first comes again."""
    known = record.setdefault(exercise["id"], {})
    count = len(exercise["hints"])
    number = known.get("hints", 0) % count
    print(f"{exercise['id']}, hint {number + 1} of {count}: {exercise['hints'][number]}")
    known["hints"] = number + 1
    records.write_record(record)


def print_task(file):
    """Print what an exercise asks for, as its file says it."""
    if file.exists():
        task = re.search(r"^(Task|Symptom):.*?(?=^Run:)", file.read_text(), re.M | re.S)
        print(task[0] if task else "", end="")


def file_of(exercise, solution):
    """Return the path of an exercise, or of its solution."""
    file = ROOT / exercise["file"]
    return file.parent / "solutions" / file.name if solution else file


def check(exercise, record, solution=False, show_task=False):
    """Check one exercise, print its lines, and remember it. Return whether it passed."""
    file = file_of(exercise, solution)
    name = file.relative_to(ROOT)
    title = f"{exercise['id']}  {name}, ranks: {exercise['processes']}"
    print(f"{title}, the solution" if solution else title, flush=True)
    if show_task:
        print_task(file)
    digest = records.digest(file)
    if file.exists():
        lines = running.run(exercise, file)
    else:
        lines = [(False, f"the file is missing: git checkout {name}")]
    for right, sentence in lines:
        print(f"  {'ok' if right else 'NO'}  {sentence}")
    passed = all(right for right, _ in lines)
    if passed:
        print(f"  ->  What was wrong: {exercise['consequence']}")
    print("passed" if passed else "not yet", flush=True)
    if not solution:
        known = record.setdefault(exercise["id"], {})
        known.update(state="passed" if passed else "not yet", digest=digest)
        records.write_record(record)
    return passed


def print_next(exercises, record):
    """Print which exercise comes next, after one has passed."""
    following = not_passed(exercises, record)
    print(f"next: {following[0]['file']}" if following else "That was the last one.")


def parse_args(exercises):
    """Read the command line; exercises are {id: table of exercises.toml}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "such as 4.1, or next, or all; a lesson, such as 4, or nothing: list them"
    parser.add_argument("id", nargs="?", help=text)
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--hint", action="store_true", help="the next of three hints, no check")
    options.add_argument("--solution", action="store_true", help="check the solution instead")
    args = parser.parse_args()
    lessons = {exercise["lesson"] for exercise in exercises.values()}
    if args.id not in {None, "all", "next", *lessons, *exercises}:
        parser.exit(2, f"There is no exercise {args.id}. python scripts/check.py lists them.\n")
    if args.hint and args.id not in {"next", *exercises}:
        parser.exit(2, "--hint takes one exercise: python scripts/check.py 4.1 --hint\n")
    if args.solution and args.id not in {"all", *exercises}:
        parser.exit(2, "--solution takes one exercise: python scripts/check.py 4.1 --solution\n")
    return args


def main():
    """Do what the command line asks for; return the exit status."""
    exercises = {exercise["id"]: exercise for exercise in read_exercises()}
    args = parse_args(exercises)
    record = records.read_record()
    listed = [x for x in exercises.values() if args.id in (None, x["lesson"])]
    if listed:
        list_exercises(listed, record)
        return 0
    if args.id == "next":
        wanted = not_passed(exercises, record)[:1]
    else:
        wanted = [x for x in exercises.values() if args.id in ("all", x["id"])]
    if not wanted:
        print(f"All {len(exercises)} exercises have passed.")
        return 0
    if args.hint:
        give_hint(wanted[0], record)
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("This Python has no torch. First: source .venv/bin/activate")
    running.import_once(wanted)
    passed = [check(x, record, args.solution, args.id == "next") for x in wanted]
    if len(wanted) > 1:
        print(f"{sum(passed)} of {len(wanted)} passed")
    if args.id == "next" and all(passed):
        print_next(exercises, record)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    exit_with(main)
