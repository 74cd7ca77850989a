"""Fill in the made parts of the slides: code from the lessons, output as it was recorded.

A made part stands between two lines. The first says what belongs there, the second ends it:

    <!-- begin code 4 average_gradients -->       a function, or a method: Class.method
    <!-- begin code 4 train "model =" "opt" -->   in it, from the first line that begins so to the
                                                  next one that begins so
    <!-- begin output 4 -->                       the lesson's output in its page
    <!-- begin output 4 "epoch 0" "now" -->       from one line of it to another, or to the end
    <!-- begin recorded update_docs -->           when and where a script recorded something
    <!-- begin rows "layout" "memmap | one" -->   a table of a page: the rows that begin so
    <!-- end -->

Usage: slides/excerpts.py            fill them in
       slides/excerpts.py --check    change nothing; exit status 1 if something is stale
"""

import argparse
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from lib.course import read_course  # noqa: E402
from lib.excerpts import between, code  # noqa: E402
from lib.pages import PAGES, PART  # noqa: E402
from lib.recordings import outputs_of_pages  # noqa: E402

DECKS = ["slides/day1.md", "slides/day2.md", "slides/beyond.md"]
LINES, COLUMNS = 16, 94  # what stays legible


def recorded():
    """Return what the pages hold: {lesson id: output}, and all of their lines."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    return outputs_of_pages(), text.splitlines()


def output(markdown, words):
    """Return a recorded output, or the lines of it that are asked for, as Markdown."""
    lines = markdown.strip().splitlines()
    if words:
        lines = [lines[0], *between(lines[1:-1], *words), lines[-1]]
    return "\n".join(lines) + "\n"


def rows(lines, words):
    """Return a Markdown table of the lines that begin with these words; the first is its head."""
    chosen = [next(line for line in lines if line.startswith(f"| {word}")) for word in words]
    head = "|---" * (chosen[0].count("|") - 1) + "|"
    return "\n".join([chosen[0], head, *chosen[1:]]) + "\n"


def fill(text):
    """Return a deck's text with its made parts filled in. Raises ValueError if one cannot be."""
    lessons = {x["id"]: x for x in read_course()}
    outputs, lines = recorded()

    def part(match):
        begin, kind, words, _, end = match.groups()
        words = shlex.split(words)
        try:
            if kind == "code":
                new = code(lessons[words[0]], words[1:])
            elif kind == "output":
                new = output(outputs[words[0]], words[1:])
            elif kind == "recorded":
                begins = ("Recorded on", f"scripts/{words[0]}.py")
                new = next(x for x in lines if all(y in x for y in begins)) + "\n"
            elif kind == "rows":
                new = "\n" + rows(lines, words) + "\n"
            else:
                raise ValueError(f"There is no made part of the kind {kind!r}.")
        except (KeyError, StopIteration):
            raise ValueError(f"There is nothing (any more) for: {begin.strip()}") from None
        shown = new.splitlines()[1:-1] if "```" in new else []
        if len(shown) > LINES or any(len(line) > COLUMNS for line in shown):
            raise ValueError(f"More than {LINES} lines of {COLUMNS} characters: {begin.strip()}")
        return begin + new + end

    text, count = PART.subn(part, text)
    if count != text.count("<!-- begin "):
        raise ValueError("A mark has no end, or a > in it.")
    return text


def main():
    """Update or check the decks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    args = parser.parse_args()
    stale = []
    for deck in DECKS:
        path = ROOT / deck
        old = path.read_text()
        try:
            new = fill(old)
        except ValueError as error:
            sys.exit(f"{deck}: {error}")
        if new != old:
            stale.append(deck)
            if not args.check:
                path.write_text(new)
    if args.check and stale:
        print(f"Stale: {', '.join(stale)}. Run: python slides/excerpts.py, then slides/build.sh")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
