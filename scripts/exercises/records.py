"""What check.py remembers: which exercises have passed, in runs/exercises.json.

A record is {id: {state, digest, hints}}. state is that of the last check, passed or not yet;
digest says which file that check has seen; hints is how many hints were asked for.
"""

import contextlib
import hashlib
import json
import os
import sys

from course.lists import ROOT

RECORD = ROOT / "runs" / "exercises.json"  # remove it to begin again


def digest(file):
    """Return a short text that changes when the file does; None if there is no file."""
    if not file.exists():
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def is_record(value):
    """Return whether a value is a record that write_record has written."""
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(known, dict) and isinstance(known.get("hints", 0), int)
        for known in value.values()
    )


def read_record():
    """Return the record of earlier checks; {} if there is none.

    A damaged one is kept under another name, and the user is told.
    """
    try:
        text = RECORD.read_bytes()
    except OSError:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(text)
        if is_record(record):
            return record
    kept = RECORD.with_name(f"{RECORD.name}.damaged")
    with contextlib.suppress(OSError):
        os.replace(RECORD, kept)
    print(f"{RECORD} is damaged. It's now {kept.name}, and the list begins again.", file=sys.stderr)
    return {}


def write_record(record):
    """Keep the record, unless the folder cannot be written. Whatever stops this, none is cut."""
    temporary = RECORD.with_name(f".{RECORD.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        RECORD.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, RECORD)
