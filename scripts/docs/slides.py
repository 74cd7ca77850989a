r"""Fill in the made parts of the slides: code from the lessons, output as it was recorded.

A made part stands between two lines. The first says what belongs there, the second ends it:

    <!-- begin code 4 average_gradients -->       a function, or a method: Class.method
    <!-- begin code 4 train "model =" "opt" -->   in it, from the first line that begins so to the
                                                  next one that begins so
    <!-- begin code 4 average_gradients plain --> the same without comments and docstring
    <!-- begin output 4 -->                       the command and the lesson's output in its page
    <!-- begin output 4 "epoch 0" "now" -->       from one line of it to another, or to the end
    <!-- begin lines 8 "alone" "=" -->            the command, and the lines that begin so
    <!-- begin answer 5 "It takes {}%." "2 .* (\S+)%" -->  a sentence with numbers of the output.
                                                  A pattern with two groups gives a quotient: how
                                                  many times the first number the second one is.
                                                  A . stays within a line; [\s\S] goes beyond it.
                                                  A page instead of the lesson: day2/LAYOUT.md
    <!-- begin here 4 -->                         the strip with all parts of the day: you are here
    <!-- begin exercise 4.1 -->                   what to type for an exercise
    <!-- begin consequence 4.1 -->                what follows from its mistake
    <!-- begin recorded update_docs -->           when and where a script recorded something
    <!-- begin rows "layout" "memmap | one" -->   a table of a page: the rows that begin so
    <!-- end -->

Code, output and lines may end with mark "a" "b": the lines that begin so are highlighted. A mark
has no >, so the line that begins with => is found by "=".

Usage: scripts/docs/slides.py            fill them in
       scripts/docs/slides.py --check    change nothing; exit status 1 if something is stale
"""

import argparse
import re
import shlex
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from course.lists import read_course, read_exercises, read_pages  # noqa: E402
from docs.excerpts import between, code  # noqa: E402
from docs.pages import PAGES, PART  # noqa: E402
from docs.pages import day_of as deck_of  # noqa: E402
from docs.recordings import outputs_of_pages  # noqa: E402

DECKS = ["slides/day1.md", "slides/day2.md", "slides/beyond.md"]
LINES, COLUMNS = 16, 84  # what fits on a slide in letters of 24 pixels
INDENT = "   "  # of what does not fit into the first line of a proof


def recorded():
    """Return what the pages hold: {lesson id: output}, and all of their lines."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    return outputs_of_pages(), text.splitlines()


def short(markdown):
    """Return a recorded output whose command fits on a slide: the launcher takes a number, too."""
    fence, command, rest = markdown.split("\n", 2)
    command = re.sub(r"(?<=multinode_setup_and_run\.sh )(.*)day2/(\d+)_\w+\.py", r"\1\2", command)
    command = " \\\n    ".join(textwrap.wrap(command, 69, break_on_hyphens=False))
    lines = []
    for line in rest.splitlines():
        if line.startswith("=> "):
            lines += textwrap.wrap(line, 69, subsequent_indent=INDENT, break_on_hyphens=False)
        else:
            lines.append(line)
    return "\n".join([fence, command, *lines]) + "\n"


def output(markdown, words):
    """Return a recorded output, or its command and the lines that are asked for, as Markdown."""
    fence, command, *lines, end = markdown.strip().splitlines()
    if words:
        lines = between(lines, *words)
    return "\n".join([fence, command, *lines, end]) + "\n"


def chosen(markdown, words):
    """Return the command and the lines of a recorded output that begin with these words."""
    fence, command, *lines, end = markdown.strip().splitlines()
    lines = [next(line for line in lines if line.strip().startswith(word)) for word in words]
    return "\n".join([fence, command, *lines, end]) + "\n"


def without_comments(markdown):
    """Return code as Markdown without comments, docstrings and empty lines."""
    text = re.sub(r'^ *""".*?"""\n', "", markdown, flags=re.M | re.S)
    return re.sub(r"^ *(#.*)?\n|  # .*$", "", text, flags=re.M)


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


def answer(markdown, words):
    """Return a sentence with numbers of a recorded output, found by the patterns after it."""
    sentence, *patterns = words
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


def here(name):
    """Return the strip with the parts of a deck as marp's footer; the one of this name is bold."""
    pages = {x.get("id") or Path(x["file"]).stem: x for x in read_pages()}
    if "topic" not in pages.get(name, {}):
        raise ValueError(f"There is no topic for {name} in scripts/course.toml")
    words = []
    for other, page in pages.items():
        if "topic" in page and deck_of(page) == deck_of(pages[name]):
            word = f"{other} {page['topic']}" if other.isdigit() else page["topic"]
            words.append(f"**{word}**" if other == name else word)
    return f'<!-- _footer: "{" · ".join(words)}" -->\n'


def commands(exercise):
    """Return what to type for an exercise, as Markdown."""
    check = f"$ python scripts/check.py {exercise['id']}"
    lines = [f"$ python {exercise['file']}", check, f"{check} --hint"]
    return "\n".join(["```console", *lines, "```"]) + "\n"


def rows(lines, words):
    """Return a Markdown table of the lines that begin with these words; the first is its head."""
    chosen = [next(line for line in lines if line.startswith(f"| {word}")) for word in words]
    head = "|---" * (chosen[0].count("|") - 1) + "|"
    return "\n".join([chosen[0], head, *chosen[1:]]) + "\n"


def fill(text):
    """Return a deck's text with its made parts filled in. Raises ValueError if one cannot be."""
    lessons = {x["id"]: x for x in read_course()}
    exercises = {x["id"]: x for x in read_exercises()}
    outputs, lines = recorded()

    def part(match):
        begin, kind, words, _, end = match.groups()
        words, marked = shlex.split(words), []
        if "mark" in words:
            i = words.index("mark")
            words, marked = words[:i], words[i + 1 :]
        plain = kind == "code" and words[-1] == "plain"
        try:
            if kind == "code":
                new = code(lessons[words[0]], words[1:-1] if plain else words[1:])
                new = without_comments(new) if plain else new
            elif kind == "output":
                new = short(output(outputs[words[0]], words[1:]))
            elif kind == "lines":
                new = short(chosen(outputs[words[0]], words[1:]))
            elif kind == "answer":
                # A page instead of a lesson: numbers of its tables.
                page = words[0].endswith(".md")
                text = (ROOT / words[0]).read_text() if page else outputs[words[0]]
                new = answer(text, words[1:])
            elif kind == "here":
                new = here(words[0])
            elif kind == "exercise":
                new = commands(exercises[words[0]])
            elif kind == "consequence":
                new = exercises[words[0]]["consequence"] + "\n"
            elif kind == "recorded":
                begins = ("Recorded on", f"scripts/{words[0]}.py")
                new = next(x for x in lines if all(y in x for y in begins)) + "\n"
            elif kind == "rows":
                new = "\n" + rows(lines, words) + "\n"
            else:
                raise ValueError(f"There is no made part of the kind {kind!r}.")
            if marked:
                new = highlighted(new, marked)
        except (KeyError, StopIteration, FileNotFoundError):
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
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
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
        print(f"Stale: {', '.join(stale)}. Run: python scripts/docs/slides.py, then slides/build.sh")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
