"""Print what a lesson, its page or the slides lack that all others have; exit status 1 if any."""

import ast
import itertools
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from catalog import read_days, read_exercises, read_lessons, read_pages  # noqa: E402
from docs.excerpts import DIVIDING_LINE  # noqa: E402
from docs.pages import PAGES, parts_of  # noqa: E402
from docs.records import SHOWN, read_records  # noqa: E402

FIELDS = ["Builds on", "New here", "Run", "Look for", "Try next"]
# In this order. A page leaves out what does not earn its place there, but for NEEDED.
SECTIONS = ["Predict", "Run", "What happened", "The idea", "The change", "In your own script"]
SECTIONS += ["Check yourself", "What to remember", "Exercises", "Further reading"]
NEEDED = {"Run", "What happened"}

# Functions that may have more forms. Lesson 4's own loop sends: rank 0 cannot use it alone. On
# Day 1 the ranks may also meet at a URL that start is given.
FORMS = {"evaluate": 2, "Net": 5, "gap_to_one_process": 2, "start": 2}
GROUPS = r"\b(?:init_process_group|new_group|new_subgroups\w*|init_device_mesh)"
# Of a call, or of a page as far as it shows one, up to two brackets deep.
CALL = re.compile(GROUPS + r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*")
ALL_RANKS = re.compile(r"init_device_mesh\(\S+, \(\w+,\)$")  # takes the group that there is


def read(file):
    return (ROOT / file).read_text()


def of_lesson(lesson, showed):
    """Yield what a lesson's script lacks; showed is the proof line that it printed."""
    text = read(lesson["file"])
    if lesson["id"] != "0" and text.count(DIVIDING_LINE) != 1:
        yield "not one dividing line"
    if "DistributedSampler(" in text and "for epoch in" in text and ".set_epoch(" not in text:
        yield "each epoch has the same order: no set_epoch"
    lines = ast.get_docstring(ast.parse(text)).splitlines()
    values = dict(line.split(": ", 1) for line in lines[2:] if re.match(r"\w", line))
    if list(values) != FIELDS:
        yield f"the docstring must have: {', '.join(FIELDS)}"
    # The shape of the proof line, not its values: the reader is asked to predict those.
    elif not re.fullmatch(re.escape(values["Look for"].strip()).replace(r"\.\.\.", ".+"), showed):
        yield f"does not print what to look for: {showed}"


def of_page(page):
    """Yield what a lesson's page lacks."""
    if not (ROOT / page["file"]).exists():
        yield "there is no such page"
        return
    text = read(page["file"])
    sections = re.findall(r"^## (.*)$", text, re.M)
    if sections != [x for x in SECTIONS if x in sections] or not {*sections} >= NEEDED:
        yield f"the sections must be some of these, in this order: {', '.join(SECTIONS)}"
    if "?" not in text.partition("\n## Run\n")[0]:
        yield "asks nothing before it is run"
    kinds = ["head", "output", "foot"]
    if any(exercise["lesson"] == page["id"] for exercise in read_exercises()):
        kinds.append("exercises")
    for kind in kinds:
        if f"<!-- begin {kind} {page['id']} -->" not in text:
            yield f"no block {kind}"
    if page["taught"] and f"<!-- begin here {page['id']} -->" not in read(
        f"slides/{page['day']}.md"
    ):
        yield "is taught, but not on the slides"


def of_deck(day, pages):
    """Yield where the notes of the slides, which begin with minutes, differ from the timetable."""
    part, minutes, exercises = "Welcome", Counter(), []
    for slide in read(f"slides/{day['id']}.md").split("---\n", 2)[2].split("\n---\n"):
        header = re.search(r"<!-- header: (.*) -->", slide)
        part = header[1] if header else part
        notes = re.search(r"^<!--\n(\d+) min\b.*?-->", slide, re.M | re.S)
        if not notes:
            yield f"{part}: a slide without notes that begin with its minutes"
        minutes[part] += int(notes[1]) if notes else 0
        exercises += re.findall(r"<!-- begin exercise (\S+) -->", slide)
    parts = parts_of(day, pages)
    planned = Counter()
    for _, number, title, *_ in parts:
        planned[title] += number
    for title in planned | minutes:
        if planned[title] != minutes[title]:
            yield f"{title}: {planned[title]} minutes planned, {minutes[title]} in the notes"
    if exercises != [x for part in day["parts"] for x in part.get("exercises", [])]:
        yield "the exercises are not those of the timetable"
    typing = sum(number for _, number, *_, part in parts if "exercises" in part)
    if day["id"] != "beyond" and typing < 150:
        yield f"people type for {typing} minutes, not 150"


def of_list(lessons):
    """Yield where the list, the folders and the timetable differ."""
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("day*/*.py")}
    for file in files - {"day1/usual_script.py"} ^ {lesson["file"] for lesson in lessons}:
        yield f"{file} is in the list alone, or in the folder alone"
    parts = itertools.chain(*(day["parts"] for day in read_days()))
    # What is read at home has minutes, or the page of another lesson.
    names = {lesson["id"] for lesson in lessons if not lesson.keys() & {"minutes", "page"}}
    for name in names ^ {part.get("page") for part in parts}:
        if name and not name.endswith(".md"):
            yield f"lesson {name} must be in the timetable or have minutes, and not both"


def of_shared(lessons):
    """Yield the functions below the dividing line that are not the same in all lessons."""
    forms = {}
    for lesson in lessons:
        below = read(lesson["file"]).partition(DIVIDING_LINE)[2]
        for node in ast.parse(below).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                forms.setdefault(node.name, set()).add(ast.get_source_segment(below, node))
    del forms["parse_args"]
    for name, texts in forms.items():
        if len(texts) != FORMS.get(name, 1):
            yield f"{name} has {len(texts)} forms"


def without_timeout(file):
    """Yield the groups and data workers that would wait half an hour for somebody who is missing.

    In lessons, exercises, solutions and boxes.
    """
    text = file.read_text()
    if file.suffix == ".md":
        text = "\n".join(re.findall(r"^```(?:python|diff)\n(.*?)^```$", text, re.M | re.S))
        text = re.sub(r"^-.*\n", "", text, flags=re.M)
    calls = [call for call in CALL.findall(text) if not ALL_RANKS.match(call)]
    # Of workers, two lines before and after.
    calls += re.findall(r'(?:.*\n){2}.*num_workers(?:=|":).*(?:\n.*){2}', text)
    for call in calls:
        if "timeout" not in call:
            yield f"no timeout: {call}"


def main():
    records, pages = read_records()[SHOWN], read_pages()
    found = []
    for lesson in read_lessons():
        todo = f"no record: python scripts/update_docs.py --record {lesson['id']}"
        showed = records.get(lesson["id"], {}).get("showed", todo)
        found += [(lesson["file"], words) for words in of_lesson(lesson, showed)]
    for page in pages:
        if "id" in page:
            found += [(page["file"], words) for words in of_page(page)]
    for day in read_days():
        found += [(f"slides/{day['id']}.md", words) for words in of_deck(day, pages)]
    for page in PAGES:
        if read(page).count("<details>") != read(page).count("</details>"):
            found.append((page, "a folded block has no end"))
    found += [("scripts/course.toml", words) for words in of_list(read_lessons())]
    found += [("below the dividing line", words) for words in of_shared(read_lessons())]
    everywhere = ("day*/**/*.py", "day*/**/*.md", "slides/*.md")
    for file in itertools.chain(*map(ROOT.glob, everywhere)):
        found += [(file.relative_to(ROOT), words) for words in without_timeout(file)]
    for file, words in found:
        print(f"{file}: {words}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
