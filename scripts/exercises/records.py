"""What check.py remembers of one person's checks, and the table of a class made from it.

A person's record is runs/exercises.json: {id: {state, digest, hints, started, minutes}}. started is
the time of the first check, in seconds since 1970. minutes is the time from there to the first
check that passed, and is missing until then.

Nothing is sent anywhere. A person who wants to can hand in: then a file with a random name, in a
folder of their choice, holds for each exercise that was checked whether it has passed, and in how
many minutes. It holds no name, no code and no time of day.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import time
from statistics import median

from course.lists import ROOT

RUNS = ROOT / "runs"
RECORD = RUNS / "exercises.json"  # remove it to begin again
NAME = RUNS / "handed_in_as"  # the random name, so that handing in again replaces the file


class RecordError(Exception):
    """Something cannot be read or written. Its text is a sentence for the user."""


# One person.


def digest(file):
    """Return a short text that changes when the file does; None if there is no file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else None


def read_record():
    """Return the record of the earlier checks; {} if there is none.

    Raises RecordError if it is damaged. It is then kept under another name.
    """
    try:
        text = RECORD.read_bytes()
    except OSError:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(text)
        if is_own(record):
            return record
    kept = RECORD.with_name(f"{RECORD.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        os.replace(RECORD, kept)
    except OSError as error:
        raise RecordError(f"{RECORD} is damaged, and cannot be moved ({error.strerror}).") from None
    raise RecordError(f"{RECORD} is damaged. It is kept as {kept.name}, and the list begins again.")


def is_own(record):
    """Return whether a record is one that write_record has written."""
    if not isinstance(record, dict):
        return False
    return all(
        isinstance(known, dict)
        and isinstance(known.get("hints", 0), int)
        and is_number(known.get("started", 0))
        and is_number(known.get("minutes", 0))
        for known in record.values()
    )


def is_number(value):
    """Return whether a value is a number from 0 upwards, and no True, nan or infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def write_record(record):
    """Keep the record, unless the folder cannot be written."""
    with contextlib.suppress(OSError):
        RUNS.mkdir(exist_ok=True)
        write(RECORD, json.dumps(record, indent=1))


def write(path, text):
    """Write a file under another name, then rename it: nobody ever reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.chmod(0o644)  # the instructor may read what is handed in
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def note(known, passed, fingerprint, begin, end):
    """Put a check into what is known of an exercise. begin and end are its times in seconds."""
    before = known.get("state")
    known.update(state="passed" if passed else "not yet", digest=fingerprint)
    known.setdefault("started", begin)
    if passed and before != "passed":
        minutes = max(0, end - known["started"]) / 60  # a clock may have been set back
        known.setdefault("minutes", round(minutes, 2))


# A class.


def hand_in(record, folder):
    """Write what a class may know of a record into a folder. Return the file.

    Raises RecordError if there is nothing to hand in, or the folder cannot be written.
    """
    if not folder.is_dir():
        raise RecordError(f"There is no folder {folder}. Ask for the folder of your class.")
    shown = {
        exercise_id: {
            "passed": known.get("state") == "passed" or "minutes" in known,
            "minutes": known.get("minutes"),
        }
        for exercise_id, known in record.items()
        if "state" in known  # else only a hint was asked for
    }
    if not shown:
        raise RecordError("There is nothing to hand in yet. Check an exercise first.")
    file = folder / f"{own_name()}.json"
    try:
        write(file, json.dumps(shown, indent=1))
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise RecordError(f"{folder} {reason}. Your own record is as it was.") from None
    return file


def own_name():
    """Return the random name under which this person hands in: the same each time."""
    with contextlib.suppress(OSError, ValueError):
        name = NAME.read_text().strip()
        if re.fullmatch(r"[0-9a-f]{16}", name):
            return name
    name = secrets.token_hex(8)
    with contextlib.suppress(OSError):
        RUNS.mkdir(exist_ok=True)
        NAME.write_text(f"{name}\n")
    return name


def read_class(folder):
    """Return the records that were handed in, a list, and the names of files that are none.

    Raises RecordError if there is no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise RecordError(f"There is no folder {folder}.")
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except OSError as error:
        raise RecordError(f"{folder} cannot be read ({error.strerror}).") from None
    if not files:
        raise RecordError(f"Nobody has handed in anything in {folder} yet.")
    records, damaged = [], []
    for file in files:
        record = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if file.is_file():
                record = json.loads(file.read_bytes())
        if is_handed_in(record):
            records.append(record)
        else:
            damaged.append(file.name)
    return records, damaged


def is_handed_in(record):
    """Return whether a record is one that hand_in has written."""
    if not isinstance(record, dict):
        return False
    return all(
        isinstance(known, dict)
        and isinstance(known.get("passed"), bool)
        and (known.get("minutes") is None or is_number(known["minutes"]))
        for known in record.values()
    )


def class_table(exercises, records):
    """Return the lines of a table: who has started and passed each exercise, in how many minutes.

    exercises are those of exercises.toml, {id: table}; an exercise that nobody has started is left
    out. The median is taken over those who passed.
    """
    lines = [f"records: {len(records)}", "exercise  started  passed  median minutes  about"]
    for exercise_id, exercise in exercises.items():
        started = [record[exercise_id] for record in records if exercise_id in record]
        if not started:
            continue
        passed = [known for known in started if known["passed"]]
        minutes = [known["minutes"] for known in passed if known.get("minutes") is not None]
        middle = f"{median(minutes):.1f}" if minutes else "-"
        numbers = f"{exercise_id:>8}  {len(started):7}  {len(passed):6}  {middle:>14}"
        lines.append(f"{numbers}  {exercise['about']}")
    lines.append("Minutes: from the first check of an exercise to the first one that passed.")
    return lines
