"""What only the decks show: parts of recorded outputs, highlighted lines, the strip, the agenda."""

import re
import textwrap
from pathlib import Path

from course.lists import ROOT
from docs.excerpts import between
from docs.pages import DECKS, day_of, parts_of, table
from docs.recordings import folded

LINES, COLUMNS = 16, 84  # what fits on a slide in letters of 24 pixels
INDENT = "   "  # of what does not fit into the first line of a proof


def output(course, page, name, *words):
    """Return a recorded output: folded in a page; in a deck the command and some of its lines."""
    if page not in DECKS:
        return folded(course.outputs[name])
    fence, command, *lines, end = course.outputs[name].strip().splitlines()
    if words:
        lines = between(lines, *words)
    return short(fence, command, [*lines, end])


def lines(course, page, name, *words):
    """Return the command and the lines of a recorded output that begin with these words."""
    fence, command, *lines, end = course.outputs[name].strip().splitlines()
    chosen = [next(line for line in lines if line.strip().startswith(word)) for word in words]
    return short(fence, command, [*chosen, end])


def short(fence, command, rest):
    """Return an output whose command and proof fit on a slide: the launcher takes a number, too."""
    command = re.sub(r"(?<=multinode_setup_and_run\.sh )(.*)day2/(\d+)_\w+\.py", r"\1\2", command)
    command = " \\\n    ".join(textwrap.wrap(command, 69, break_on_hyphens=False))
    lines = []
    for line in rest:
        if line.startswith("=> "):
            lines += textwrap.wrap(line, 69, subsequent_indent=INDENT, break_on_hyphens=False)
        else:
            lines.append(line)
    return "\n".join([fence, command, *lines]) + "\n"


def highlighted(markdown, words):
    """Return a block of code whose lines that begin with these words are to be highlighted."""
    fence, *lines = markdown.splitlines()
    numbers = []
    for word in words:
        found = [i for i, line in enumerate(lines, 1) if line.strip().startswith(word)]
        if not found:
            raise StopIteration
        numbers += found
        for i in range(found[-1], len(lines)):
            if word != "=" or not lines[i].startswith(INDENT):
                break
            numbers.append(i + 1)
    return "\n".join([f"{fence} {{{','.join(map(str, sorted(numbers)))}}}", *lines]) + "\n"


def answer(course, page, source, sentence, *patterns):
    """Return a sentence with numbers of a recorded output, or of a page, found by the patterns."""
    markdown = (ROOT / source).read_text() if source.endswith(".md") else course.outputs[source]
    numbers = []
    for pattern in patterns:
        found = re.search(pattern, markdown, re.M)
        if not found:
            raise StopIteration
        number, *more = found.groups()
        if more:
            first, second = (float(x.replace(",", "")) for x in found.groups())
            number = f"{float(f'{second / first:.2g}'):g}"  # 130, not 1.3e+02
        numbers.append(number)
    return sentence.format(*numbers) + "\n"


def here(course, page, name):
    """Return the strip with the parts of a deck as marp's footer; the one of this name is bold."""
    named = {x.get("id") or Path(x["file"]).stem: x for x in course.pages if "topic" in x}
    words = []
    for other, x in named.items():
        if day_of(x) == day_of(named[name]):
            word = f"{other} {x['topic']}" if other.isdigit() else x["topic"]
            words.append(f"**{word}**" if other == name else word)
    return f'<!-- _footer: "{" · ".join(words)}" -->\n'


def agenda(course, here, day):
    """Return the agenda of a day: what comes before the lunch's end beside what comes after it."""
    halves, half = [], []
    for _, minutes, title, page, part in parts_of(course.days[day], course.pages):
        topic = part.get("topic") or (page or {}).get("topic", "")
        half.append([title, topic, str(minutes)])
        if title == "Lunch":
            halves, half = [half], []
    morning, afternoon = *halves, half
    for shorter in (morning, afternoon):
        shorter += [["", "", ""]] * (max(len(morning), len(afternoon)) - len(shorter))
    rows = [a + b for a, b in zip(morning, afternoon)]
    return "\n" + table(["morning", "topic", "min", "afternoon", "topic", "min"], rows) + "\n"


def exercise(course, page, name):
    """Return what to type for an exercise, as Markdown."""
    check = f"$ python scripts/check.py {name}"
    lines = [f"$ python {course.exercises[name]['file']}", check, f"{check} --hint"]
    return "\n".join(["```console", *lines, "```"]) + "\n"


def consequence(course, page, name):
    """Return what follows from the mistake of an exercise."""
    return course.exercises[name]["consequence"] + "\n"


def check_size(block):
    """Raise ValueError if code or output does not fit on a slide."""
    lines = block.splitlines()[1:-1] if "```" in block else []
    if len(lines) > LINES or any(len(line) > COLUMNS for line in lines):
        raise ValueError(f"more than {LINES} lines of {COLUMNS} characters for")
