"""The pages: where they are, their made parts, the ways between them, and their tables."""

import os
import re
from pathlib import Path

from course.lists import ROOT, read_days

FOLDERS = [
    "",
    "day1",
    "day1/exercises",
    "day2",
    "day2/exercises",
    "scripts",
    "tests",
    "tests/faults",
]
PAGES = [str(x.relative_to(ROOT)) for f in FOLDERS for x in sorted((ROOT / f).glob("*.md"))]
PAGES.append("slides/TEACHING.md")  # scripts/docs/slides.py sees to the decks beside it
PART = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def link_to(file, page):
    """Return the way from a page to a file, both from the root of the repository."""
    return os.path.relpath(file, Path(page).parent)


def title_of(page):
    """Return what a page is called: "Lesson 4" for a lesson, else its first heading."""
    if page.get("id", "").isdigit():
        return f"Lesson {page['id']}"
    return page.get("id") or (ROOT / page["file"]).read_text().partition("\n")[0].removeprefix("# ")


def day_of(page):
    """Return where a page belongs: day1, day2 or beyond."""
    return "beyond" if page.get("beyond") else page["file"].partition("/")[0]


def ways(name, pages):
    """Return the line with the links to the pages before and after, and to the day's list.

    name is the id of a lesson or a file.
    """
    i = next(i for i, x in enumerate(pages) if name in (x.get("id"), x["file"]))
    here, words = pages[i]["file"], []
    if i > 0:
        words.append(f"[← {title_of(pages[i - 1])}]({link_to(pages[i - 1]['file'], here)})")
    folder = here.partition("/")[0]
    words.append(f"[Day {folder[-1]}](README.md)")
    if i + 1 < len(pages):
        words.append(f"[{title_of(pages[i + 1])} →]({link_to(pages[i + 1]['file'], here)})")
    return " · ".join(words) + "\n"


def head(name, pages):
    """Return what stands below a page's title: the ways, then minutes, script and slides."""
    page = next(x for x in pages if name in (x.get("id"), x["file"]))
    if "minutes" not in page:
        return ways(name, pages)
    words = [f"{page['minutes']} minutes"]
    if "script" in page:
        script = Path(page["script"]).name
        words.append(f"script [{script}]({script})")
    deck = f"{day_of(page)}.pdf"
    words.append(f"slides [{deck}](../slides/{deck})")
    return f"{ways(name, pages)}\n{' · '.join(words)}\n"


def lesson_table(day, page, pages, exercises):
    """Return a Markdown table of the pages of a day, or beyond; with exercises, if given."""
    rows = ["| page | the one idea | minutes |", "|---|---|---|"]
    if exercises:
        rows = [f"{rows[0]} exercises |", f"{rows[1]}---|"]
    for x in pages:
        if day_of(x) != day:
            continue
        link = f"[{title_of(x)}]({link_to(x['file'], page)})"
        cells = [link, x["idea"], str(x.get("minutes", ""))]
        if exercises:
            own = [e for e in exercises if e["lesson"] == x.get("id")]
            cells.append(" ".join(f"[{e['id']}]({link_to(e['file'], page)})" for e in own))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def parts_of(day, pages):
    """Return the parts of a day, a list of (minute of the day, minutes, title, page, exercises).

    page is a table of read_pages, or None for a part that is no page; exercises is a list of ids.
    """
    hour, minute = map(int, day["begin"].split(":"))
    clock, parts = 60 * hour + minute, []
    for part in day["parts"]:
        page = None
        if "page" in part:
            page = next(x for x in pages if part["page"] in (x.get("id"), x["file"]))
        title = title_of(page) if page else part["title"]
        minutes = page["minutes"] if page else part["minutes"]
        parts.append((clock, minutes, title, page, part.get("exercises", [])))
        clock += minutes
    return parts


def timetable(name, here, pages, exercises):
    """Return a Markdown table of a day of a class, with links for the page in which it stands."""
    day = next(x for x in read_days() if x["id"] == name)
    files = {x["id"]: x["file"] for x in exercises}
    rows = ["| begin | part | minutes | exercises |", "|---|---|---|---|"]
    for clock, minutes, title, page, ids in parts_of(day, pages):
        part = f"[{title}]({link_to(page['file'], here)})" if page else title
        links = " ".join(f"[{x}]({link_to(files[x], here)})" for x in ids)
        rows.append(f"| {clock // 60:02}:{clock % 60:02} | {part} | {minutes} | {links} |")
    return "\n".join(rows) + "\n"


def exercise_table(chosen, page):
    """Return a Markdown table of exercises for a page."""
    rows = ["| exercise | kind | lesson | minutes | what it is about |", "|---|---|---|---|---|"]
    for x in chosen:
        cells = [x["kind"], x["lesson"], str(x["minutes"]), x["about"]]
        rows.append(f"| [{x['id']}]({link_to(x['file'], page)}) | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def exercises_of(name, page, exercises):
    """Return the exercises of a lesson as Markdown, with the command that checks the first."""
    chosen = [x for x in exercises if x["lesson"] == name]
    if not chosen:
        return "This lesson has no exercise that checks itself.\n"
    rows = ["| exercise | kind | minutes | what it is about |", "|---|---|---|---|"]
    for x in chosen:
        link = f"[{x['id']}]({link_to(x['file'], page)})"
        rows.append(f"| {link} | {x['kind']} | {x['minutes']} | {x['about']} |")
    which = "the first" if chosen[1:] else "it"
    check = f"`python scripts/check.py {chosen[0]['id']}` checks {which}; `--hint` helps."
    return "\n".join([*rows, "", check, ""])
