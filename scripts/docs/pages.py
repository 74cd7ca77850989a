"""The pages and decks: where they are, links between them, tables of what there is."""

import itertools
import os
import re
from pathlib import Path

from catalog import ROOT
from records import stale

BEGIN = 9 * 60  # the minute of the day at which a class begins
DECKS = [f"slides/{x}.md" for x in ("day1", "day2", "beyond", "half-day", "sharding")]
GLOBS = ("*.md", "[!.]*/*.md", "*/exercises/*.md", "data/records/*.md")
FILES = [str(x.relative_to(ROOT)) for glob in GLOBS for x in sorted(ROOT.glob(glob))]
PAGES = [file for file in FILES if file not in DECKS]
PLAY = "slides/play.html"  # it has values only
SITE = ".zensical.toml"


def table(head, rows):
    """Return a Markdown table; head and each row are lists of texts."""
    lines = [" | ".join(cells) for cells in (head, *rows)]
    lines = [f"| {line} |" for line in lines]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines) + "\n"


def link(words, file, at):
    """Return a link from a page to a file, both from the root of the repository."""
    return f"[{words}]({os.path.relpath(file, Path(at).parent)})"


def title_of(page):
    """Return what a page is called: "Lesson 4" for a lesson, otherwise its first heading."""
    if page.get("id", "").isdigit():
        return f"Lesson {page['id']}"
    return page.get("id") or (ROOT / page["file"]).read_text().partition("\n")[0].removeprefix("# ")


def page_of(name, pages):
    """Return a page; name is the id of a lesson or a file."""
    return next(x for x in pages if name in (x.get("id"), x["file"]))


def foot(course, at, name):
    i = course.pages.index(page_of(name, course.pages))
    words = [link(f"← {title_of(x)}", x["file"], at) for x in course.pages[:i][-1:]]
    words.append(f"[Day {at.partition('/')[0][-1]}](README.md)")
    words += [link(f"{title_of(x)} →", x["file"], at) for x in course.pages[i + 1 :][:1]]
    return " · ".join(words) + "\n"


def head(course, at, name):
    page, links = page_of(name, course.pages), foot(course, at, name)
    if "minutes" not in page:
        return links
    words = [f"{page['minutes']} minutes"]
    if "script" in page:
        script = Path(page["script"]).name
        words.append(f"script [{script}]({script})")
    if page["taught"]:
        deck = f"{page['day']}.md"
        words.append(f"slides [{deck}](../slides/{deck})")
    return f"{links}\n{' · '.join(words)}\n"


def lessons(course, at, day):
    rows = []
    for x in course.pages:
        if x["day"] == day:
            name = link(title_of(x), x["file"], at)
            rows.append([name, x["idea"], str(x.get("minutes", ""))])
    return table(["page", "the one idea", "minutes"], rows)


def nav(course, at, day):
    """Return a day's lines of the web site's side bar; the last # is for the mark of the end."""
    files = [x["file"] for x in course.pages if x["day"] == day]
    names = [(ROOT / file).read_text().partition("\n")[0].lstrip("# ") for file in files]
    lines = [f'    {{ "{name}" = "{file}" }},' for name, file in zip(names, files)]
    return "\n".join([*lines, "# "])


def parts_of(day, pages):
    """Return the parts of a day, a list of (minute of the day, minutes, title, page, part).

    page is a table of read_pages, or None for a part that is no page; part is course.toml's table.
    """
    clock, parts = BEGIN, []
    for part in day["parts"]:
        page = page_of(part["page"], pages) if "page" in part else None
        title = title_of(page) if page else part["title"]
        parts.append((clock, part["minutes"], title, page, part))
        clock += part["minutes"]
    return parts


def timetable(course, at, day):
    rows, whole = [], 0
    for clock, minutes, title, page, part in parts_of(course.days[day], course.pages):
        file = page["file"] if page else part.get("file")
        name = link(title, file, at) if file else title
        own = [course.exercises[x] for x in part.get("exercises", [])]
        links = " ".join(link(x["id"], x["file"], at) for x in own)
        hours = part.get("gpus", 0) * minutes / 60
        whole += hours
        shown = f"{hours:.0f}" if hours else ""
        rows.append([f"{clock // 60:02}:{clock % 60:02}", name, str(minutes), links, shown])
    head = ["begin", "part", "minutes", "exercises", "GPU-hours"]
    if not whole:
        return table(head[:-1], [row[:-1] for row in rows])
    return table(head, [*rows, ["", "all", "", "", f"{whole:.0f}"]])


def exercises(course, at, where):
    every = course.exercises.values()
    chosen = [x for x in every if where == x["lesson"] or x["file"].startswith(f"{where}/")]
    if not chosen:
        return "This lesson has no exercise that checks itself.\n"
    rows = []
    for x in chosen:
        name = link(x["id"], x["file"], at)
        rows.append([name, x["kind"], x["minutes"], x["about"]])
    first = chosen[0]["id"]
    check = f"`python scripts/check.py {first}` checks {first}; `--hint` helps."
    return f"{table(['exercise', 'kind', 'minutes', 'what it is about'], rows)}\n{check}\n"


def measured(course, page):
    """Return a table with a column for each kind of machine. The lesson may have changed since."""
    notes = [x[name] for x in course.records.values() for name in course.lessons if name in x]
    recorded = {(x["recorded"], x["on"]) for x in notes}
    command = "`python scripts/update_docs.py --record`"
    lines = [f"Recorded on {date} with {command}: {on}." for date, on in sorted(recorded)]
    rows = [[name] for name in course.lessons]
    for record in course.records.values():
        older = stale(record, course.runs)
        for row in rows:
            x = record.get(row[0])
            mark = ", older code" if row[0] in older else ""
            row.append(f"`{x['showed']}` {x['seconds']:.0f} s{mark}" if x else "")
    kinds = [name.replace("-", " ").replace("cpu", "CPU") for name in course.records]
    return "\n\n".join([" ".join(lines), table(["lesson", *kinds], rows)])


def faults(course, page):
    """Return the table of the faults, or None if the tests of faults have not just run."""
    return course.faults


# Of decks only.


def here(course, page, name):
    named = {x.get("id") or Path(x["file"]).stem: x for x in course.pages if x["taught"]}
    words = []
    for other, x in named.items():
        if x["day"] == named[name]["day"]:
            word = x.get("strip") or x["topic"]
            word = f"{other} {word}" if other.isdigit() else word
            words.append(f"**{word}**" if other == name else word)
    return f'<!-- _footer: "{" · ".join(words)}" -->\n'


def agenda(course, at, day):
    parts = parts_of(course.days[day], course.pages)
    rows = [[title, part.get("topic", ""), str(minutes)] for _, minutes, title, _, part in parts]
    half = [row[0] for row in rows].index("Lunch") + 1
    halves = itertools.zip_longest(rows[:half], rows[half:], fillvalue=["", "", ""])
    rows = [morning + afternoon for morning, afternoon in halves]
    return "\n" + table(["morning", "topic", "min", "afternoon", "topic", "min"], rows) + "\n"


def exercise(course, page, name):
    file = course.exercises[name]["file"]
    command = re.search("^Run: +(.*)$", (ROOT / file).read_text(), re.M)[1]
    if len(command) > 64:
        command = f"{command.removesuffix(file)}\\\n    {file}"
    check = f"$ python scripts/check.py {name}"
    lines = [f"$ {command}", check, f"{check} --hint"]
    return "\n".join(["```console", *lines, "```"]) + "\n"


def consequence(course, page, name):
    return course.exercises[name]["consequence"] + "\n"
