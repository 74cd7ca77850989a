"""Write a deck for one setting, as marp reads it. slides/build.sh calls it.

Usage: python3 slides/deck.py DECK [laptop|cluster|cloud]
       python3 slides/deck.py DECK timetable

In a deck, what stands between these marks is for the settings that are named:

    <!-- only: cluster cloud -->
    <!-- /only -->

A slide that is only this mark stands for slides of another deck: for a part, or for one slide.

    <!-- slides: day1 Lesson 0 -->
    <!-- slides: day1 Two reasons to distribute: time and memory -->

And this one is the list of the parts of the deck, with the minutes of their notes:

    <!-- agenda -->

The words <machine>, <activate>, <place> and <nodes> come from site.txt, for a cluster.
"""

import re
import sys
from pathlib import Path

SLIDES = Path(__file__).resolve().parent
SETTINGS = ["laptop", "cluster", "cloud"]
# Off a cluster, a slide that explains the line of salloc shows it as at a site that we know.
EXAMPLE = {"nodes": "--qos interactive --constraint gpu --account=vision"}
ONLY = re.compile(r"<!-- only: ([a-z ]+) -->\n(.*?)<!-- /only -->\n", re.S)
HEADER = re.compile(r"<!-- header: (.*) -->")
FOOTER = re.compile(r'<!-- _footer: "(.*)" -->')
BREAKS = ("Break", "Lunch")


def read_slides(deck, setting):
    """Return what comes before the slides of a deck, and its slides as (deck, part, text)."""
    text = (SLIDES / f"{deck}.md").read_text()
    text = ONLY.sub(lambda only: only[2] if setting in only[1].split() else "", text)
    _, front, body = text.split("---\n", 2)
    part, slides = "Welcome", []
    for slide in body.split("\n---\n"):
        other = re.fullmatch(r"<!-- slides: (\S+) (.*) -->", slide.strip())
        if other:
            _, known = read_slides(other[1], setting)
            chosen = [x for x in known if other[2] == x[1] or f"\n## {other[2]}\n" in x[2]]
            if not chosen:
                sys.exit(f"{deck}.md wants a part or a slide that {other[1]}.md lacks: {other[2]}")
            if chosen[0][1] == other[2]:
                part = other[2]
            slides += [(name, part, text) for name, _, text in chosen]
        else:
            header = HEADER.search(slide)
            part = header[1] if header else part
            slides.append((deck, part, slide))
    return f"---\n{front}---\n", slides


def timetable(slides):
    """Return the parts in their order: begin, title, minutes, decks, exercises."""
    clock, parts = 9 * 60, []
    for deck, part, text in slides:
        notes = re.findall(r"^<!--\n(\d+) min\b", text, re.M)
        if not notes:
            sys.exit(f"{deck}.md, {part}: a slide without notes that begin with its minutes")
        if not parts or part != parts[-1][1] or part in BREAKS:
            parts.append([f"{clock // 60:02}:{clock % 60:02}", part, 0, [], []])
        minutes = sum(map(int, notes))
        clock += minutes
        parts[-1][2] += minutes
        parts[-1][3] += [deck] * (deck not in parts[-1][3])
        parts[-1][4] += re.findall(r"<!-- begin exercise (\S+) -->", text)
    return parts


def as_table(parts):
    """Return the timetable as the guide for instructors has it."""
    rows = ["| begin | part | minutes | slides | exercise |", "|---|---|---|---|---|"]
    for begin, part, minutes, decks, exercises in parts:
        rows.append(f"| {begin} | {part} | {minutes} | {' '.join(decks)} | {' '.join(exercises)} |")
    return "\n".join(rows).replace("|  |", "| |") + "\n"


def as_agenda(parts):
    """Return the list of the parts in two columns, for a slide."""
    cells = [f"{begin} | {part} | {minutes}" for begin, part, minutes, *_ in parts]
    half = (len(cells) + 1) // 2
    rows = ["| begin | part | min | begin | part | min |", "|---|---|---|---|---|---|"]
    for i in range(half):
        right = cells[half + i] if half + i < len(cells) else "| |"
        rows.append(f"| {cells[i]} | {right} |")
    return "\n".join(rows)


def words_of(setting):
    """Return the words that the slides name, such as <place>. Those of a site are in site.txt."""
    if setting != "cluster":
        return EXAMPLE
    lines = (SLIDES / "site.txt").read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    words = {name.strip(): value.strip() for name, _, value in pairs}
    empty = [name for name, value in words.items() if not value]
    if empty:
        sys.exit(f"slides/site.txt has no word for: {', '.join(empty)}. Put in those of your site.")
    return words


def fill(text, words):
    """Put in the words, in lines that fit on a slide."""
    for name, value in words.items():
        if name == "activate":  # one command a line
            value = value.replace(" && ", "\n$ ")
        elif len(value) > 50:
            value = re.sub(r"(.{30,62}) (?=-)", r"\1 \\\n    ", value)
        text = text.replace(f"<{name}>", value)
    return text


def write(deck, setting):
    """Return the text of a deck for marp."""
    front, slides = read_slides(deck, setting)
    texts = [text for _, _, text in slides]
    if any(name != deck for name, *_ in slides):
        # The strip names the lessons of this deck only.
        strips = [match[1] for match in map(FOOTER.search, texts) if match]
        own = [re.search(r"\*\*(.*?)\*\*", strip)[1] for strip in strips]
        for i, text in enumerate(texts):
            here = FOOTER.search(text)
            if here:
                bold = re.search(r"\*\*(.*?)\*\*", here[1])[1]
                strip = " · ".join(f"**{x}**" if x == bold else x for x in own)
                texts[i] = text.replace(here[1], strip)
        # And each part its name in the corner, also if a slide alone was taken.
        for i, (_, part, text) in enumerate(slides):
            if not HEADER.search(text):
                texts[i] = f"\n<!-- header: {part} -->\n{texts[i]}"
    text = "\n---\n".join(texts)
    if "<!-- agenda -->" in text:
        text = text.replace("<!-- agenda -->", as_agenda(timetable(slides)))
    text = fill(text, words_of(setting))
    left = re.search(r"(?<!^)<(?!you>)[a-z][a-z_ -]*>", re.sub(r"<!--.*?-->", "", text, flags=re.S))
    if left:
        sys.exit(f"{deck}.md: nobody says what {left[0]} is, in a deck for {setting}")
    return front + text


def main():
    deck, *setting = sys.argv[1:]
    setting = setting[0] if setting else "laptop"
    if setting == "timetable":
        print(as_table(timetable(read_slides(deck, "laptop")[1])), end="")
    else:
        print(write(deck, setting), end="")


if __name__ == "__main__":
    main()
