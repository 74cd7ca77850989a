"""The course: where it lies, and its lessons, pages and exercises as the two lists name them.

The lists are course.toml and exercises.toml. The standard library is enough.
"""

import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "scripts/multinode_setup_and_run.sh"


def read_list(name, table):
    """Return the tables [[table]] of a list, in their order."""
    return tomllib.loads((ROOT / "scripts" / name).read_text())[table]


def read_course():
    """Return the lessons, a list of the tables [[lesson]] in course.toml."""
    return read_list("course.toml", "lesson")


def read_exercises():
    """Return the exercises, a list of the tables [[exercise]] in exercises.toml."""
    return read_list("exercises.toml", "exercise")


def read_days():
    """Return the timetables of a class, a list of the tables [[day]] in course.toml."""
    return read_list("course.toml", "day")


def read_pages():
    """Return the lessons and the other pages of the course, in the order in which they are read.

    All have the keys file (of the page) and idea, and minutes if they are taught in class; a lesson
    has all others of course.toml, and script.
    """
    pages, others = [], read_list("course.toml", "page")
    for x in read_course():
        pages += [other for other in others if other["before"] == x["id"]]
        pages.append({**x, "script": x["file"], "file": str(Path(x["file"]).with_suffix(".md"))})
    return pages


def load(file):
    """Return a lesson as a module, for what it defines; file is its path from the root."""
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
