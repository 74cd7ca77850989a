"""What the decks show in their own form: outputs, highlighted lines, the strip, the agenda."""

import itertools
import re
import textwrap
from pathlib import Path

from catalog import ROOT
from docs.pages import DECKS, parts_of, table
from docs.records import SHOWN

WIDTH = 69  # characters of a command or a proof that fit on a slide


def output(course, page, name, *begins):
    """Return a recorded output: folded in a page; in a deck the lines that begin with these texts.

    In a deck the command and the proof fit on a slide. The launcher takes a number, too.
    """
    record = course.records[SHOWN][name]
    command, lines = record["command"], record["output"]
    if page not in DECKS:
        summary = "<summary>Our output (yours will differ in times and last digits)</summary>"
        shown = "\n".join(["```console", f"$ {command}", *lines, "```"])
        return f"<details>\n{summary}\n\n{shown}\n\n</details>\n"
    command = re.sub(r"(?<=multinode_setup_and_run\.sh )(.*)day2/(\d+)_\w+\.py", r"\1\2", command)
    command = textwrap.wrap(f"$ {command}", WIDTH, break_on_hyphens=False)
    if begins:
        lines = [lines[i] for i in places(lines, begins)]
    if lines[-1].startswith("=> "):
        proof = textwrap.wrap(lines[-1], WIDTH, subsequent_indent="   ", break_on_hyphens=False)
        lines = [*lines[:-1], *proof]
    return "\n".join(["```console", " \\\n    ".join(command), *lines, "```"]) + "\n"


def places(lines, begins):
    """Return where the lines are that begin with one of these texts; each text must begin one."""
    lines = [line.strip() for line in lines]
    for text in begins:
        next(line for line in lines if line.startswith(text))
    return [i for i, line in enumerate(lines) if line.startswith(tuple(begins))]


def highlighted(markdown, begins):
    """Return code or output whose lines that begin with these texts are to be highlighted."""
    fence, *lines, end = markdown.splitlines()
    numbers = places(lines, begins)
    if lines[numbers[-1]].startswith("=> "):  # the proof comes last, and may have several lines
        numbers += range(numbers[-1] + 1, len(lines))
    numbers = ",".join(str(i + 1) for i in numbers)
    return "\n".join([f"{fence} {{{numbers}}}", *lines, end]) + "\n"


def answer(course, page, source, sentence, *patterns):
    """Return a sentence with numbers of a recorded output, or of a page, found by the patterns."""
    if source.endswith(".md"):
        text = (ROOT / source).read_text()
        text = re.sub(r"<!-- /?n .*?-->", "", text)  # a number in a sentence, without its marks
    else:
        text = "\n".join(course.records[SHOWN][source]["output"])
    numbers = []
    for pattern in patterns:
        number, *more = next(re.finditer(pattern, text, re.M)).groups()
        if more:
            first, second = (float(x.replace(",", "")) for x in (number, *more))
            number = f"{float(f'{second / first:.2g}'):g}"  # 130, not 1.3e+02
        numbers.append(number)
    return sentence.format(*numbers) + "\n"


def here(course, page, name):
    """Return the strip with the parts of a deck as marp's footer; this part is bold."""
    named = {x.get("id") or Path(x["file"]).stem: x for x in course.pages if x["taught"]}
    words = []
    for other, x in named.items():
        if x["day"] == named[name]["day"]:
            word = f"{other} {x['topic']}" if other.isdigit() else x["topic"]
            words.append(f"**{word}**" if other == name else word)
    return f'<!-- _footer: "{" · ".join(words)}" -->\n'


def agenda(course, here, day):
    """Return the agenda of a day: the parts up to lunch beside the parts after it."""
    rows = []
    for _, minutes, title, page, part in parts_of(course.days[day], course.pages):
        topic = part.get("topic") or (page or {}).get("topic", "")
        rows.append([title, topic, str(minutes)])
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
