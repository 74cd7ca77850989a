"""Print what a lesson, its page or the slides lack that all others have; exit status 1 if any."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "slides")]

import deck  # noqa: E402
from catalog import (  # noqa: E402
    read_days,
    read_exercises,
    read_lessons,
    read_pages,
    read_requirements,
    read_runs,
)
from docs.excerpts import DIVIDING_LINE  # noqa: E402
from docs.pages import DECKS, FILES, PAGES, parts_of  # noqa: E402
from records import SHOWN, read_records, read_values, stale  # noqa: E402

FIELDS = ["Builds on", "New here", "Run", "Look for", "Try next"]
# In this order. A page leaves out what does not earn its place there, but for NEEDED.
SECTIONS = ["Predict", "Run", "What happened", "The idea", "The change", "In your own script"]
SECTIONS += ["Check yourself", "What to remember", "Exercises", "Further reading"]
NEEDED = {"Run", "What happened"}

# Functions that may have more forms. Lesson 4's own loop sends: rank 0 cannot use it alone. On
# Day 1 the ranks may also meet at a URL that start is given; the start of exercises is another, and
# those of lesson 17 have schedules of their own.
FORMS = {"evaluate": 2, "Net": 5, "gap_to_one_process": 2, "start": 3, "receive": 2, "slots": 3}
# So many functions of an exercise without TODO may differ from the solution's
FAULTS = {"fill in": 0, "find the fault": 2, "capstone": 3}
# What is imported of a requirement, where it has another name
MODULES = {"tensorboard": "tensorboard", "torch-tb-profiler": "profiler"}
GROUPS = r"\b(?:init_process_group|new_group|new_subgroups\w*|init_device_mesh)"
# Of a call, or of a page as far as it shows one, up to two brackets deep.
CALL = re.compile(GROUPS + r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*")
# Rows of a tensor of bytes, picked by indexing: day2/LAYOUT.md has what index_select is worth.
ROWS = re.compile(
    r"\b(?:images|labels|tensor|x|\w+_set)\[(?:indices|index|order|permutation|rows)\]"
)
ALL_RANKS = re.compile(r"init_device_mesh\(\S+, \(\w+,\)$")  # takes the group that there is


def read(file):
    return (ROOT / file).read_text()


def of_lesson(lesson, showed):
    """Yield what a lesson's script lacks; showed is its recorded proof line, if any."""
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
    elif showed and not re.fullmatch(
        re.escape(values["Look for"].strip()).replace(r"\.\.\.", ".+"), showed
    ):
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


def of_deck(day, pages, setting):
    """Yield where the notes of the slides, which begin with minutes, differ from the timetable."""
    planned, minutes, exercises = Counter(), Counter(), []
    for _, title, number, _, own in deck.timetable(deck.read_slides(day["id"], setting)[1]):
        minutes[title] += number
        exercises += own
    parts = parts_of(day, pages)
    for _, number, title, *_ in parts:
        planned[title] += number
    for title in planned | minutes:
        if planned[title] != minutes[title]:
            found = f"{planned[title]} minutes planned, {minutes[title]} in the notes"
            yield f"{title}, {setting}: {found}"
    if exercises != [x for part in day["parts"] for x in part.get("exercises", [])]:
        yield "the exercises are not those of the timetable"
    typing = sum(number for _, number, *_, part in parts if "exercises" in part)
    if day["id"] != "beyond" and typing < 150:
        yield f"people type for {typing} minutes, not 150"


def of_short(name):
    """Yield where a deck made of others differs from its timetable, or a break is late."""
    tables = [deck.timetable(deck.read_slides(name, x)[1]) for x in deck.SETTINGS]
    if tables[1:] != tables[:-1]:
        yield "its minutes are not the same in all settings"
    guide = {"half-day": "TEACHING.md", "sharding": "TEACHING_THIRD_DAY.md"}[name]
    if deck.as_table(tables[0]) not in read(f"slides/{guide}"):
        yield f"{guide} lacks what `python3 slides/deck.py {name} timetable` prints"
    sitting = 0
    for begin, part, number, *_ in tables[0]:
        sitting = 0 if part in deck.BREAKS else sitting + number
        if sitting > 90:
            yield f"no break for more than 90 minutes at {begin}"


def of_list(lessons):
    """Yield where the list, the folders and the timetable differ."""
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("day*/*.py")}
    own = {"day1/usual_script.py", "day2/count_step.py", "day2/read_speed.py"}  # of pages
    for file in files - own - {lesson["file"] for lesson in lessons}:
        yield f"{file} has no line under [page]: scripts/README.md says how to add a lesson"
    parts = itertools.chain(*(day["parts"] for day in read_days()))
    # What is read at home has minutes, or the page of another lesson.
    names = {lesson["id"] for lesson in lessons if not lesson.keys() & {"minutes", "page"}}
    for name in names ^ {part.get("page") for part in parts}:
        if name and not name.endswith(".md"):
            yield f"lesson {name} must be in a day's timetable, or its line have minutes"
    cases = set(tomllib.loads(read("tests/support/cases.toml")))
    for name in {lesson["id"] for lesson in lessons} ^ cases:
        yield f"lesson {name} needs, or has left, a table [{name}] in tests/support/cases.toml"
    known = {exercise["file"] for exercise in read_exercises()}
    for path in ROOT.glob("day*/exercises/*.py"):
        if str(path.relative_to(ROOT)) not in known:
            number = path.name.partition("_")[0]
            yield f'{path.name} has no solution, or no table ["{number}"] in hints.toml beside it'


def of_records():
    """Yield what was recorded with other code, or never."""
    record = read_records()[SHOWN]
    for name in stale(record, read_runs()):
        known = name in record
        todo = (
            f"--stamp {name}: recorded with other code"
            if known
            else f"--record {name}: not recorded"
        )
        yield f"taskset -c 0,1 python scripts/update_docs.py {todo}"


def left_behind(lessons):
    """Yield the places that speak of a lesson which is not in the list, and idle requirements."""
    known = {lesson["id"] for lesson in lessons} | {"all"}
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    texts = {x: read(x) for x in files if x.endswith((".py", ".md", ".toml", ".sh", ".html"))}
    for file, text in texts.items():
        spoken = re.findall(r"\b[Ll]essons? ((?:\d+(?:, | and | or | to )?)+)", text)
        spoken += re.findall(r"^(?:Builds on: +|\[|.*\bday\d/)(\d+)[_.\]]", text, re.M)
        spoken += re.findall(r"(?:LESSONS\[|load_lesson\(|full\()\"(\d+)\"", text)
        for name in sorted({*re.findall(r"\d+", " ".join(spoken))} - known, key=int):
            yield file, f"there is no lesson {name}"
    tables = {f"{kind}.json": record for kind, record in read_records().items()}
    tables["values.toml"] = read_values()
    for file, table in tables.items():
        for name in table.keys() - read_runs().keys() - {"all"}:
            yield f"data/records/{file}", f"there is no lesson {name}: delete what it has"
    code = "".join(text for file, text in texts.items() if re.match(r"(day\d|scripts)/.*py$", file))
    for name in read_requirements():
        module = MODULES.get(name, name)
        if not re.search(rf"\b(import|from) .*\b{module}\b", code):
            yield "requirements.txt", f"nothing imports {name}"


def of_shared():
    """Yield the functions below the dividing line that are not the same in all files."""
    forms = {}
    for path in ROOT.glob("day*/**/*.py"):
        below = re.split(r"^# ---- .*\n", path.read_text(), flags=re.M)[1:]
        for name, text in parts_of_code("".join(below), ast.FunctionDef | ast.ClassDef).items():
            files = forms.setdefault(name, {}).setdefault(text.strip(), [])
            files.append(str(path.relative_to(ROOT)))
    del forms["parse_args"]
    for name, texts in forms.items():
        if len(texts) != FORMS.get(name, 1):
            files = ", ".join(min(texts.values(), key=len))
            yield f"{name} has {len(texts)} forms (FORMS in .ci/lint_course.py), one in {files}"


def of_options(lessons):
    """Yield the options whose name is another in a lesson that builds on this one, as 10 on 6."""
    names = {}
    for lesson in lessons:
        options = r'add\(\s*"(--[\w-]+)"[^)]*?help="([^"(]{20,})'
        for name, words in re.findall(options, read(lesson["file"])):
            names.setdefault(words, {}).setdefault(name, []).append(lesson["id"])
    for words, found in names.items():
        if len(found) > 1:
            each = ", ".join(f"{name} in {' '.join(where)}" for name, where in found.items())
            yield f"one option has two names ({words.strip()}): {each}"


def of_lost_options():
    """Yield (text, what it still says of an option) that a script has lost since the last commit.

    Only the script and its own page are asked if another script has an option of that name.
    Without git, or in a clean clone, nothing was lost.
    """
    quoted = r'"(--[a-z][\w-]+)"'
    scripts = [x for folder in ("day1", "day2", "scripts") for x in (ROOT / folder).glob("*.py")]
    anywhere = {name for x in scripts for name in re.findall(quoted, x.read_text())}
    asked = {}
    for script in scripts:
        command = ["git", "-C", ROOT, "show", f"HEAD:{script.relative_to(ROOT)}"]
        before = subprocess.run(command, capture_output=True, text=True).stdout
        for name in {*re.findall(quoted, before)} - {*re.findall(quoted, script.read_text())}:
            pages = [script.with_suffix(".md")] if name in anywhere else map(ROOT.joinpath, FILES)
            asked.setdefault(name, {script}).update(page for page in pages if page.exists())
    for name, texts in asked.items():
        for text in sorted(texts):
            if count := len(re.findall(rf"(?<![\w-]){name}(?![\w-])", text.read_text())):
                yield text.relative_to(ROOT), f"says {name} {count} times, which is no option now"


def parts_of_code(text, kinds=ast.stmt):
    """Return what stands in Python code, {name: text}: functions, methods, other statements.

    Comments before or after it belong to a part, imports and docstrings are left out.
    """
    lines, parts, nodes = text.splitlines(), {}, []
    for node in ast.parse(text).body:
        inner = node.body if isinstance(node, ast.ClassDef) and kinds is ast.stmt else [node]
        nodes += [(f"{node.name}." if inner != [node] else "", x) for x in inner]
    starts = [
        min([x, *getattr(x, "decorator_list", [])], key=lambda x: x.lineno).lineno for _, x in nodes
    ]
    for (owner, node), begin, end in zip(nodes, starts, [*starts[1:], len(lines) + 1]):
        if isinstance(node, kinds) and not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            name = getattr(node, "name", "") or ast.unparse(node).partition(" = ")[0]
            parts[owner + name] = "\n".join(lines[begin - 1 : end - 1]).strip()
    return parts


def of_exercise(exercise):
    """Yield what an exercise lacks, and where its solution differs beyond what is to be done."""
    number, lesson = exercise["id"], exercise["lesson"]
    file = ROOT / exercise["file"]
    checks = file.parent / f"checks/lesson_{lesson}.py"
    check = f"def check_{number.replace('.', '_')}("
    if not checks.exists() or check not in checks.read_text():
        yield f"{checks.relative_to(ROOT)} has no {check}exercise, rank, world_size)"
    answers = tomllib.loads((file.parent / "checks/answers.toml").read_text())["answer"]
    kinds = {answer["says"] == "passes" for answer in answers if answer["exercise"] == number}
    for right in {True, False} - kinds:
        yield f"answers.toml has no {'right' if right else 'wrong'} answer"
    if not file.exists():
        yield "the solution has no exercise of this name"
        return
    texts = [x.read_text() for x in (file, file.parent / "solutions" / file.name)]
    heads = [text.partition("\nRun: ")[0].partition(" ")[2] for text in texts]
    if heads[0] != heads[1]:
        yield "its docstring is not the solution's"
    given, solved = map(parts_of_code, texts)
    changed = [x for x in given | solved if given.get(x) != solved.get(x)]
    changed = [x for x in changed if "TODO" not in given.get(x, "")]
    if len(changed) > FAULTS[exercise["kind"]]:
        yield f"differs from the solution in {', '.join(changed)}"


def of_code(file):
    """Yield what's slow in lessons, exercises, solutions and boxes.

    Groups and data workers that would wait half an hour for somebody who is missing, and rows of
    bytes that are picked by indexing.
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
    yield from (f"use index_select: {rows}" for rows in ROWS.findall(text))


def main():
    missing = [x["file"] for x in read_lessons() if not (ROOT / x["file"]).exists()]
    if missing:
        sys.exit(f"There is no {', '.join(missing)}: delete its line in scripts/course.toml")
    records, pages = read_records()[SHOWN], read_pages()
    found = []
    for lesson in read_lessons():
        showed = records.get(lesson["id"], {}).get("showed")
        found += [(lesson["file"], words) for words in of_lesson(lesson, showed)]
    for page in pages:
        if "id" in page:
            found += [(page["file"], words) for words in of_page(page)]
    for day, setting in itertools.product(read_days(), deck.SETTINGS):
        found += [(f"slides/{day['id']}.md", words) for words in of_deck(day, pages, setting)]
    for name in ("half-day", "sharding"):
        found += [(f"slides/{name}.md", words) for words in of_short(name)]
    for page in PAGES:
        if read(page).count("<details>") != read(page).count("</details>"):
            found.append((page, "a folded block has no end"))
    for name, setting in itertools.product(DECKS, ["laptop", "cloud"]):
        deck.write(Path(name).stem, setting)  # it ends here if a word is left open
    found += [("scripts/course.toml", words) for words in of_list(read_lessons())]
    found += [("below the dividing line", words) for words in of_shared()]
    found += [(f"data/records/{SHOWN}.json", words) for words in of_records()]
    for exercise in read_exercises():
        found += [(exercise["file"], words) for words in of_exercise(exercise)]
    found += [("day*/", words) for words in of_options(read_lessons())]
    found += of_lost_options()
    found += left_behind(read_lessons())
    everywhere = ("day*/**/*.py", "day*/**/*.md", "slides/*.md")
    for file in itertools.chain(*map(ROOT.glob, everywhere)):
        # Nobody copies checks, which have a limit of their own; and nothing waits on fake ranks.
        if file.parent.name != "checks" and file.name != "count_step.py":
            found += [(file.relative_to(ROOT), words) for words in of_code(file)]
    for file, words in found:
        print(f"{file}: {words}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
