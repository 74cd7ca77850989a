"""Check an exercise: start it on its ranks and see what each of them really does.

A check says what was measured on each rank and what is allowed: symptoms, not causes, and one at a
time. --hint gives the next hint and runs nothing: where there are several things to do, it's about
the first one that the last check found missing. Once an exercise has passed, it says why.

Without an id: list the exercises and which of them have passed. With a lesson, such as 4: list its
exercises. With next: check the first one that hasn't passed yet, those of the timetable first. What
has passed is remembered in runs/exercises.json. --watch checks again whenever the file is saved.

Each exercise has its check in exercises/, and its hints beside the solutions. Don't read them,
because that takes the fun out of it: ask with --hint.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path

from catalog import ROOT, read_days, read_exercises
from exercises import runner
from processes import exit_with
from progress import SignOfLife

# {id: {"passed": the digest of the file that has passed, "part": the key of the hints that fit the
#       last check, "hints": how many of them were asked for}}
RECORD = ROOT / "runs" / "exercises.json"
TYPES = {"passed": str, "part": str, "hints": int}


def read_record():
    """Return the record of the exercises, without those for which it is damaged."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return {x: what for x, what in json.loads(RECORD.read_bytes()).items() if is_whole(what)}
    return {}


def is_whole(what):
    """Return whether a record of one exercise is as this program writes it."""
    return isinstance(what, dict) and all(isinstance(what[x], TYPES.get(x, object)) for x in what)


def remember(record, exercise, **what):
    """Add to the record, and save it. Return whether its folder can be written."""
    record[exercise["id"]] = {**record.get(exercise["id"], {}), **what}
    temporary = RECORD.with_name(f".{RECORD.name}.{os.getpid()}")
    try:
        RECORD.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, RECORD)  # whatever stops this, the record is complete
    except OSError as error:
        print(f"Can't remember this in runs/exercises.json: {error.strerror}", flush=True)
        return False
    return True


def digest(file):
    """Return a short text that changes when the file does."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else "no file"


def has_passed(exercise, record):
    """Return whether an exercise has passed with its file as it is now."""
    return record.get(exercise["id"], {}).get("passed") == digest(ROOT / exercise["file"])


def list_exercises(exercises, record):
    for exercise in exercises:
        state = "passed" if has_passed(exercise, record) else "not yet"
        print(f"{exercise['id']:>5}  {state:8}  {exercise['kind']:15} {exercise['file']}")
    command = f"python scripts/check.py {exercises[0]['id']}"
    print(f"Check one: {command}      A hint: {command} --hint")
    print("The first one that hasn't passed: python scripts/check.py next")


def give_hint(exercise, record):
    """Print the next hint, and remember it; after the last hint, the first one again."""
    known = record.get(exercise["id"], {})
    parts = exercise["hints"]
    hints = parts.get(known.get("part")) or next(iter(parts.values()))
    number = known.get("hints", 0) % len(hints)
    print(f"{exercise['id']}, hint {number + 1} of {len(hints)}: {hints[number]}")
    if not remember(record, exercise, hints=number + 1):
        print(*("The other hints:", *hints[:number], *hints[number + 1 :]), sep="\n")


def show(findings):
    """Print what is right, and the first thing that is wrong."""
    wrong = list(dict.fromkeys(x.what for x in findings if not x.right))
    right = {}
    for x in findings:
        if x.right:
            right.setdefault(x.what, []).append(x)
    for x in findings:
        if not x.right and x.what == wrong[0]:
            print(f"  NO  {x}")
    for what, ranks in right.items():
        print(f"  ok  {ranks[0] if len(ranks) == 1 else what}")
    if more := len(wrong[1:]):
        print(f"      and {more} more symptom{'s' * (more > 1)}")


def check(exercise, record, solution=False, show_task=False):
    """Check one exercise, print its lines, and remember it. Return whether it passed."""
    file = ROOT / exercise["file"]
    if solution:
        file = file.parent / "solutions" / file.name
    if not file.exists():
        print(f"not yet: the file is missing. Restore it: git checkout {exercise['file']}")
        return False
    title = f"{exercise['id']}  {file.relative_to(ROOT)}, ranks: {exercise['processes']}"
    print(f"{title}, the solution" if solution else title, flush=True)
    text = file.read_text(errors="replace")
    if show_task:
        task = re.search(r"^(Task|Symptom):.*?(?=^Run:)", text, re.M | re.S)
        print(task[0] if task else "", end="")
    checked = digest(file)
    with SignOfLife():
        findings = runner.run(exercise, file)
    wrong = [x for x in findings if not x.right]
    show(findings)
    lines = enumerate(text.splitlines(), 1)
    todo = [str(number) for number, line in lines if re.search("# *TODO", line)]
    if todo and wrong:
        print(f"TODO: line{'s' * (len(todo) > 1)} {', '.join(todo)}")
    if not wrong:
        print(f"  ->  Why: {exercise['consequence']}")
    print("not yet" if wrong else "passed", flush=True)
    if not solution:
        known = record.get(exercise["id"], {})
        result = {} if wrong else {"passed": checked}
        keys = [x.key for x in wrong if x.key in exercise["hints"]]
        if keys and keys[0] != known.get("part"):
            result |= {"part": keys[0], "hints": 0}
        remember(record, exercise, **result)
    return not wrong


def watch(exercise, record):
    """Check an exercise, and again whenever its file has changed, until it passes."""
    while not check(exercise, record):
        print("Save the file, and it is checked again. Ctrl-C ends this.", flush=True)
        before = digest(ROOT / exercise["file"])
        while digest(ROOT / exercise["file"]) == before:
            time.sleep(0.3)
    return True


def parse_args(exercises):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "such as 4.1, its file, or next; a lesson, such as 4, or nothing, lists exercises"
    parser.add_argument("ids", nargs="*", metavar="id", help=text)
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--hint", action="store_true", help="the next hint, not a check")
    options.add_argument("--solution", action="store_true", help="check the solution instead")
    options.add_argument("--watch", action="store_true", help="check whenever the file is saved")
    args = parser.parse_args()
    ids = {exercise["id"] for exercise in exercises}
    lessons = {exercise["lesson"] for exercise in exercises}
    args.ids = [Path(name).name.partition("_")[0] for name in args.ids if name != "list"]
    for name in args.ids:
        if name not in {"next", *lessons, *ids}:
            parser.exit(2, f"There is no exercise {name}. python scripts/check.py lists them.\n")
    if (args.hint or args.solution or args.watch) and (
        len(args.ids) != 1 or args.ids[0] in lessons
    ):
        parser.exit(2, "Name one exercise: python scripts/check.py 4.1 --hint\n")
    return args


def in_order(exercises):
    """Return the exercises in the order in which they are done: first those of the timetable."""
    parts = [part for day in read_days() for part in day["parts"]]
    taught = [name for part in parts for name in part.get("exercises", ())]
    return sorted(exercises, key=lambda x: (*taught, x["id"]).index(x["id"]))


def main():
    exercises = read_exercises()
    args = parse_args(exercises)
    record = read_record()
    following = [x for x in in_order(exercises) if not has_passed(x, record)]
    lessons = {x["lesson"] for x in exercises}
    if not lessons.isdisjoint(args.ids) or not args.ids:
        list_exercises([x for x in exercises if not args.ids or x["lesson"] in args.ids], record)
        return 0
    wanted = [x for x in exercises if x["id"] in args.ids]
    wanted += following[:1] if "next" in args.ids else []
    if not wanted:
        print(f"All {len(exercises)} exercises have passed.")
        return 0
    if args.hint:
        give_hint(wanted[0], record)
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("This Python has no torch. Activate one that does: source .venv/bin/activate")
    with SignOfLife():
        runner.import_once(wanted)
    if args.watch:
        return 0 if watch(wanted[0], record) else 1
    passed = [check(x, record, args.solution, "next" in args.ids) for x in wanted]
    if "next" in args.ids and all(passed):
        rest = following[1:]
        print(f"next: {rest[0]['file']}" if rest else "That was the last one.")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    exit_with(main)
