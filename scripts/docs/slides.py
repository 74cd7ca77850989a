"""What only the decks have: the strip, the agenda, and what to type for an exercise."""

import itertools
import re
from pathlib import Path

from catalog import ROOT
from docs.pages import parts_of, table


def here(course, page, name):
    """Return the strip with the parts of a deck as marp's footer; this part is bold."""
    named = {x.get("id") or Path(x["file"]).stem: x for x in course.pages if x["taught"]}
    words = []
    for other, x in named.items():
        if x["day"] == named[name]["day"]:
            word = x.get("strip") or x["topic"]
            word = f"{other} {word}" if other.isdigit() else word
            words.append(f"**{word}**" if other == name else word)
    return f'<!-- _footer: "{" · ".join(words)}" -->\n'


def agenda(course, here, day):
    """Return the agenda of a day: the parts up to lunch beside the parts after it."""
    rows = []
    for _, minutes, title, _, part in parts_of(course.days[day], course.pages):
        rows.append([title, part.get("topic", ""), str(minutes)])
    half = [row[0] for row in rows].index("Lunch") + 1
    halves = itertools.zip_longest(rows[:half], rows[half:], fillvalue=["", "", ""])
    rows = [morning + afternoon for morning, afternoon in halves]
    return "\n" + table(["morning", "topic", "min", "afternoon", "topic", "min"], rows) + "\n"


def exercise(course, page, name):
    """Return what to type for an exercise, as Markdown: the line "Run:" of its file, the checks."""
    file = course.exercises[name]["file"]
    command = re.search("^Run: +(.*)$", (ROOT / file).read_text(), re.M)[1]
    if len(command) > 64:
        command = f"{command.removesuffix(file)}\\\n    {file}"
    check = f"$ python scripts/check.py {name}"
    lines = [f"$ {command}", check, f"{check} --hint"]
    return "\n".join(["```console", *lines, "```"]) + "\n"


def consequence(course, page, name):
    """Return what follows from the mistake of an exercise."""
    return course.exercises[name]["consequence"] + "\n"
