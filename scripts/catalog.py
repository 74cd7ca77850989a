"""The course as its lists name it, requirements.txt among them. Needs no package."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036, it may be any Python that is active
    todo = "Name a newer one: PYTHON=python3.12"
    sys.exit(f"Python 3.11 or newer is needed; this one is {sys.version.split()[0]}. {todo}")

import importlib.util
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
LAUNCHER = "scripts/multinode_setup_and_run.sh"
# torch>=2.6, or: viztracer; python_version < "3.15"
REQUIREMENT = r'^([\w.-]+)((?:>=[\d.]+)?)(?:; python_version < "3\.(\d+)")?$'


def read_lessons():
    """Return the lessons: a list of the tables page of scripts in course.toml.

    Each also gets file, id, arguments, and nodes, which says whether it runs on all nodes.
    """
    lessons = []
    for file, lesson in tomllib.loads((SCRIPTS / "course.toml").read_text())["page"].items():
        path = Path(file)
        if path.suffix == ".py":
            number, _, _ = path.stem.partition("_")
            name = number if number.isdigit() else path.stem
            nodes = number.isdigit() and file.startswith("day2/")
            lessons.append({"file": file, "id": name, "nodes": nodes, "arguments": [], **lesson})
    return lessons


def read_exercises():
    """Return the exercises: a list of the tables in hints.toml, beside the solutions.

    Each also gets id, lesson, file, from the root of the repository, and hints, where it has none:
    {pattern: list}. The solution, which is always there, tells about, processes, imports, minutes
    and kind: fill in, find the fault, or capstone.
    """
    exercises = []
    lists = [tomllib.loads(file.read_text()) for file in sorted(ROOT.glob("day*/*/*/hints.toml"))]
    for name, exercise in (item for tables in lists for item in tables.items()):
        solution = next(ROOT.glob(f"day*/exercises/solutions/{name}_*.py"), None)
        if not solution:
            sys.exit(f"hints.toml has {name}, but there is no file solutions/{name}_....py")
        text = solution.read_text()
        known = {"id": name, "lesson": name.partition(".")[0]}
        known["file"] = str(solution.relative_to(ROOT).parents[1] / solution.name)
        title = r'"""Solution [\d.]+: (.*)\.\n(?:.*\n)*?Kind: +(.*), (\d+) minutes\n'
        title, ranks = re.match(title, text), re.search(r"--nproc-per-node=(\d+)", text)
        if not title or not ranks:
            sys.exit(f"{solution} must begin as the others do, and have a start() as they have")
        known |= zip(("about", "kind", "minutes"), title.groups())
        known["processes"] = int(ranks[1])
        known["imports"] = re.findall(r"^(?:from|import) ([\w.]+)", text, re.M)
        keys = [] if "hints" in exercise else ["question", "experiment", "answer"]
        for key in {*keys, "consequence"} - exercise.keys():
            sys.exit(f'the table ["{name}"] of {solution.with_name("hints.toml")} has no {key}')
        known["hints"] = {"": [exercise[key] for key in keys]}
        exercises.append({**known, **exercise})
    return exercises


def read_variants():
    """Return the lines of which a page asks which is wrong, {lesson id: table of variants.toml}."""
    return tomllib.loads((SCRIPTS / "variants.toml").read_text())


def read_runs():
    """Return what update_docs.py records, {id: lesson}: lessons, and variants such as 6.wrong.

    A variant has the keys of its lesson, other arguments, and perhaps change: (line, instead). If
    the wrong one is short, the right one is recorded as short.
    """
    runs = {lesson["id"]: lesson for lesson in read_lessons()}
    for name, x in read_variants().items():
        short = {"arguments": x.get("arguments", [])}
        runs[f"{name}.wrong"] = runs[name] | short | {"change": x["wrong"]}
        if short["arguments"]:
            runs[f"{name}.right"] = runs[name] | short
    return runs


def source_of(lesson):
    """Return the code of a lesson, or of a variant of it."""
    if not (ROOT / lesson["file"]).exists():
        sys.exit(f"There is no {lesson['file']}: delete its line in scripts/course.toml")
    text = (ROOT / lesson["file"]).read_text()
    line, instead = lesson.get("change", ("", ""))
    if line and text.count(line) != 1:
        raise ValueError(f"{lesson['file']} has {text.count(line)} times: {line}")
    return text.replace(line, instead) if line else text


def write_variant(folder, file, line, instead):
    """Write a lesson with another line into a folder, and the data beside it. Return its path."""
    variant = Path(folder, file)
    variant.parent.mkdir()
    variant.write_text(source_of({"file": file, "change": (line, instead)}))
    Path(folder, "data").symlink_to(ROOT / "data")
    return variant


def read_days():
    """Return the timetables of a class: the days of course.toml, each with its id and its parts."""
    days = tomllib.loads((SCRIPTS / "course.toml").read_text())["day"]
    return [{"id": name, "parts": parts} for name, parts in days.items()]


def read_pages():
    """Return the lessons and the other pages of the course, in the order in which they are read.

    All have the keys file (of the page), idea and day: where they are taught, day1, day2 or beyond.
    taught says whether they are in a timetable; then they have its minutes, topic and strip. A
    lesson also has its other keys of course.toml, and script. One that is explained on another
    lesson's page names that page, and has none here.
    """
    lessons = {lesson["file"]: lesson for lesson in read_lessons()}
    parts = {part.get("page"): (day["id"], part) for day in read_days() for part in day["parts"]}
    pages = []
    for file, page in tomllib.loads((SCRIPTS / "course.toml").read_text())["page"].items():
        page["file"] = file
        if file in lessons:
            page = lessons[file] | {"file": str(Path(file).with_suffix(".md")), "script": file}
        day, part = parts.get(page.get("id", file), ("beyond", {}))
        page |= {key: part[key] for key in ("minutes", "topic", "strip") if key in part}
        if "page" not in page:
            pages.append({**page, "day": day, "taught": bool(part)})
    return pages


def read_requirements(file="requirements.txt"):
    """Return what this Python needs, {distribution: ">=2.6", or ""}."""
    found = re.findall(REQUIREMENT, (ROOT / file).read_text(), re.M)
    minor = sys.version_info.minor
    return {name: oldest for name, oldest, before in found if minor < int(before or 99)}


def is_older(version, oldest):
    """Return whether a version is before ">=2.6" or "==2.6". 2.6.0a0+site is not."""
    both = [re.search(r"[\d.]*\d|$", text)[0].split(".") for text in (version, oldest)]
    found, wanted = [[int(number or 0) for number in numbers] for numbers in both]
    return found < wanted


def load(file):
    """Return a lesson as a module, for what it defines; file is its path from the root."""
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
