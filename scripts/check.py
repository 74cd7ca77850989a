"""Check an exercise: start it on its ranks and see what each of them really does.

A check says what was measured on each rank and what is allowed: symptoms, not causes, and one at a
time. --hint gives the next hint and runs nothing: where there are several things to do, it's about
the first one that the last check found missing. Once an exercise has passed, it says why.

Without an id: list the exercises and which of them have passed. With a lesson, such as 4: list its
exercises. With next: check the first one that hasn't passed yet. What has passed is remembered in
runs/exercises.json.

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

from catalog import ROOT, read_exercises
from exercises import runner
from processes import exit_with

# {id: {"passed", "checked": the digests of the file that has passed, and of the last one checked,
#       "part": the key of the hints that fit, "hints": how many of them were asked for}}
RECORD = ROOT / "runs" / "exercises.json"


def read_record():
    """Return the record of the exercises. If there is none, or it is damaged, begin a new one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        record = json.loads(RECORD.read_bytes())
        return {exercise: what for exercise, what in record.items() if isinstance(what, dict)}
    return {}


def remember(record, exercise, **what):
    """Add to the record, and save it if its folder can be written."""
    record[exercise["id"]] = {**record.get(exercise["id"], {}), **what}
    temporary = RECORD.with_name(f".{RECORD.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        RECORD.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, RECORD)  # whatever stops this, the record is complete


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


def find_part(exercise, record, wrong=()):
    """Return the key of the hints for the lines that say NO. If none fits, it stays as it was."""
    parts = list(exercise["hints"])
    fitting = [part for part in parts if any(re.search(part, line) for line in wrong)]
    last = record.get(exercise["id"], {}).get("part")
    return [*fitting, *(part for part in parts if part == last), *parts][0]


def give_hint(exercise, record):
    """Print the next hint, and remember it; after the last hint, the first one again."""
    known = record.get(exercise["id"], {})
    hints = exercise["hints"][find_part(exercise, record)]
    number = known.get("hints", 0) % len(hints)
    if len(exercise["hints"]) > 1 and known.get("checked") != digest(ROOT / exercise["file"]):
        print("Check the file as it is now: then hints are about the first thing that it lacks.")
    print(f"{exercise['id']}, hint {number + 1} of {len(hints)}: {hints[number]}")
    remember(record, exercise, hints=number + 1)


def symptom_of(sentence):
    """Return the words of a line up to what's right: the same on all ranks for one symptom."""
    words = re.sub(r"^rank [\d, ]+:|\d[\d.]*(e[-+]\d+)?|\b(nan|inf)\b", "", sentence)
    return re.sub(r"\W+", " ", words.partition("right:")[0])


def show(lines):
    """Print the lines that say ok, and of those that say NO the first symptom, of all ranks."""
    symptoms = list(dict.fromkeys(symptom_of(sentence) for right, sentence in lines if not right))
    for right, sentence in lines:
        if right or symptom_of(sentence) == symptoms[0]:
            print(f"  {'ok' if right else 'NO'}  {sentence}")
    if more := len(symptoms[1:]):
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
    if show_task:
        task = re.search(r"^(Task|Symptom):.*?(?=^Run:)", file.read_text(), re.M | re.S)
        print(task[0] if task else "", end="", flush=True)
    checked = digest(file)
    lines = runner.run(exercise, file)
    wrong = [sentence for right, sentence in lines if not right]
    passed = not wrong
    if not solution:
        result = {"checked": checked, "part": find_part(exercise, record, wrong)}
        if passed:
            result["passed"] = checked
        if result["part"] != find_part(exercise, record):
            result["hints"] = 0
        remember(record, exercise, **result)
    show(lines)
    if passed:
        print(f"  ->  Why: {exercise['consequence']}")
    print("passed" if passed else "not yet", flush=True)
    return passed


def parse_args(exercises):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "such as 4.1, or next; a lesson, such as 4, or nothing, lists exercises"
    parser.add_argument("id", nargs="?", help=text)
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--hint", action="store_true", help="the next hint, not a check")
    options.add_argument("--solution", action="store_true", help="check the solution instead")
    args = parser.parse_args()
    ids = {exercise["id"] for exercise in exercises}
    lessons = {exercise["lesson"] for exercise in exercises}
    if args.id not in {None, "next", *lessons, *ids}:
        parser.exit(2, f"There is no exercise {args.id}. python scripts/check.py lists them.\n")
    if args.hint and args.id not in {"next", *ids}:
        parser.exit(2, "--hint takes one exercise: python scripts/check.py 4.1 --hint\n")
    if args.solution and args.id not in ids:
        parser.exit(2, "--solution takes one exercise: python scripts/check.py 4.1 --solution\n")
    return args


def main():
    exercises = read_exercises()
    args = parse_args(exercises)
    record = read_record()
    following = [x for x in exercises if not has_passed(x, record)]
    if args.id == "next":
        wanted = following[:1]
    else:
        wanted = [x for x in exercises if args.id in (None, x["lesson"], x["id"])]
    if not wanted:
        print(f"All {len(exercises)} exercises have passed.")
        return 0
    if args.id in (None, wanted[0]["lesson"]):
        list_exercises(wanted, record)
        return 0
    if args.hint:
        give_hint(wanted[0], record)
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("This Python has no torch. Activate one that does: source .venv/bin/activate")
    runner.import_once(wanted[0])
    passed = check(wanted[0], record, args.solution, args.id == "next")
    if args.id == "next" and passed:
        rest = following[1:]
        print(f"next: {rest[0]['file']}" if rest else "That was the last one.")
    return 0 if passed else 1


if __name__ == "__main__":
    exit_with(main)
