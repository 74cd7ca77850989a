"""Excerpts of lessons and of what they printed, and what one lesson changes in another."""

import ast
import difflib
import re
import textwrap
from pathlib import Path

from catalog import ROOT
from docs.pages import DECKS
from records import SHOWN

# The line between the lesson and its shared helpers
DIVIDING_LINE = "\n# ---- Shared helpers, identical in every lesson\n"
WIDTH = 69  # characters of a command or a proof that fit on a slide


def code(course, page, name, function, *words):
    """Return an excerpt of a lesson or an exercise as Markdown; see docs.blocks for the words."""
    source = (ROOT / (course.lessons | course.exercises)[name]["file"]).read_text()
    node = ast.parse(source)
    for part in function.split("."):
        node = next(x for x in node.body if getattr(x, "name", None) == part)
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    if words:  # from the line that begins with the first to the next that begins with the last
        begins = [line.strip() for line in lines]
        first = next(i for i, line in enumerate(begins) if line.startswith(words[0]))
        last = next(i for i, line in enumerate(begins) if i >= first and line.startswith(words[1]))
        lines = lines[first : last + 1]
    text = textwrap.dedent("\n".join(lines))
    if page in DECKS:  # without docstrings, comments and empty lines
        text = re.sub(r'^ *""".*?"""\n', "", text, flags=re.M | re.S)
        text = re.sub(r"^ *(#.*)?\n|  # .*$", "", text, flags=re.M)
    return f"```python\n{text}\n```\n"


def variants(course, page, name):
    """Return the two variants of a line of a lesson, and in which function each is."""
    source, shown = (ROOT / course.lessons[name]["file"]).read_text(), []
    changes = [x for kind, x in course.variants[name].items() if kind in ("right", "wrong")]
    for letter, (line, *instead) in zip("AB", changes, strict=True):
        number = source[: source.index(line)].count("\n") + 1
        around = [x for x in ast.walk(ast.parse(source)) if hasattr(x, "decorator_list")]
        around = [x.name for x in around if x.lineno <= number <= x.end_lineno]
        shown.append(f"# {letter}, in {'.'.join(around)}")
        shown += instead or [line.partition("  #")[0]]
    return "\n".join(["```python", *shown, "```", ""])


def output(course, page, name, *begins):
    """Return a recorded output, or the lines of it that begin with these texts; folded in a page.

    In a deck the command and the proof fit on a slide. The launcher takes a number, too.
    """
    record = course.records[SHOWN][name]
    command, lines = record["command"], record["output"]
    if begins:
        lines = [lines[i] for i in places(lines, begins)]
    if page not in DECKS:
        what = "What we saw" if begins else "Our output"
        summary = f"<summary>{what} (your times and last digits differ)</summary>"
        shown = "\n".join(["```console", f"$ {command}", *lines, "```"])
        return f"<details>\n{summary}\n\n{shown}\n\n</details>\n"
    command = re.sub(r"(?<=multinode_setup_and_run\.sh )(.*)day2/(\d+)_\w+\.py", r"\1\2", command)
    command = textwrap.wrap(f"$ {command}", WIDTH, break_on_hyphens=False)
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


def above_the_line(lesson):
    """Return the lines of a lesson above its dividing line, without the docstring."""
    text = (ROOT / lesson["file"]).read_text().partition(DIVIDING_LINE)[0]
    return text.rstrip().splitlines()[ast.parse(text).body[0].end_lineno :]


def diff(course, page, *names):
    old, new = (course.lessons[name] for name in names)
    files = [Path(x["file"]).name for x in (old, new)]
    lines = difflib.unified_diff(above_the_line(old), above_the_line(new), *files, lineterm="", n=1)
    lines = [re.sub(r"^(@@).*", r"\1", line) for line in lines]  # the numbers help nobody here
    added = sum(line.startswith("+") for line in lines) - 1
    removed = sum(line.startswith("-") for line in lines) - 1
    whole = f"The whole files: `diff {old['file']} {new['file']}`"
    words = f"{added} lines added, {removed} removed. {whole}"
    return "\n".join(["```diff", *lines, "```", "", words, ""])
