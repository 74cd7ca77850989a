"""The lesson contract: scripts that stand alone and yet are one course."""

import ast
import difflib
import re

import pytest
from helpers import COURSE, LESSONS, ROOT

MAX_LINES = 200
# They compute something besides.
MAX_LINES_OF = {"11": 288, "12": 294, "13": 315, "14": 282}
MAX_LINES_OF |= {"16": 273, "17": 271}
FIELDS = ["Builds on:", "New here:", "Run:", "Look for:", "Try next:"]


def source(lesson_id):
    return (ROOT / LESSONS[lesson_id]["file"]).read_text()


def functions(lesson_id):
    """Return {name: text} of a lesson's functions and classes, decorators and comments included."""
    lines = source(lesson_id).splitlines()
    result = {}
    for node in ast.parse(source(lesson_id)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            result[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return result


def body(lesson_id):
    """Return a lesson's lines after its docstring."""
    lines = source(lesson_id).splitlines()
    return lines[ast.parse(source(lesson_id)).body[0].end_lineno :]


def changed_lines(old, new):
    """Return how many lines a side-by-side diff marks: a replaced line counts once."""
    matcher = difflib.SequenceMatcher(None, body(old), body(new), autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_functions_differ_from_earlier_lessons_only_as_declared(lesson_id):
    lesson, mine = LESSONS[lesson_id], functions(lesson_id)
    # The parent's version counts; where the parent has none, that of its nearest ancestor.
    known, ancestor = {}, lesson.get("parent")
    while ancestor is not None:
        known = functions(ancestor) | known
        ancestor = LESSONS[ancestor].get("parent")
    if "set_up" in lesson:
        set_up = functions(lesson["set_up"])
        known |= {name: set_up[name] for name in ("choose_device", "start")}
    assert sorted(mine.keys() - known.keys()) == sorted(lesson["adds"])
    different = [name for name in mine if name in known and mine[name] != known[name]]
    assert sorted(different) == sorted(lesson["changes"])


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_functions_stand_in_the_one_order(lesson_id):
    names = list(functions(lesson_id))
    assert names == [name for name in COURSE["order"] if name in names]


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_docstring_has_its_fields(lesson_id):
    lesson = LESSONS[lesson_id]
    docstring = ast.get_docstring(ast.parse(source(lesson_id)))
    lines = docstring.splitlines()
    assert [line.split(":")[0] + ":" for line in lines[2:]] == FIELDS
    values = dict(line.split(":", 1) for line in lines[2:])
    parent = lesson.get("parent")
    expected = LESSONS[parent]["file"].split("/")[1] if parent else "nothing"
    assert values["Builds on"].strip() == expected
    command = "scripts/multinode_setup_and_run.sh" if lesson.get("nodes") else "python"
    assert " ".join([command, *lesson.get("launcher", []), lesson["file"]]) in values["Run"]
    look_for = values["Look for"].strip()
    if look_for.startswith("=>"):
        assert re.fullmatch(lesson["proof"], look_for)


def to_try(lesson_id):
    """Return what the docstring and the README say to try: texts with options in them."""
    page = ((ROOT / LESSONS[lesson_id]["file"]).parent / "README.md").read_text()
    page = re.sub(r"<!-- begin .*?<!-- end -->", "", page, flags=re.DOTALL)
    title = f"Lesson {lesson_id}" if lesson_id.isdigit() else lesson_id
    section = page.partition(f"\n## {title}:")[2].partition("\n## ")[0]
    assert section, title
    try_next = re.search(r"^Try next: (.*)", source(lesson_id), re.MULTILINE)[1]
    return [try_next, *re.findall("`(--[^`]+)`", section)]


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_the_options_to_try_are_there(lesson_id):
    added = re.findall(r'add_argument\("(--[\w-]+)"(?:.*type=(\w+))?', source(lesson_id))
    kinds = {"int": int, "float": float}
    kind_of = {option: kinds.get(name, str) for option, name in added}
    others = (ROOT / "scripts" / "multinode_setup_and_run.sh").read_text()
    others += source("create_mnist_h5") + source("create_ratings")
    for text in to_try(lesson_id):
        for option, value in re.findall(r"(--[\w-]+)(?: (\d[\d.]*)\b)?", text):
            assert option in kind_of or option in others, text
            kind_of.get(option, str)(value or 1)


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_a_lesson_is_about_a_page(lesson_id):
    assert len(source(lesson_id).splitlines()) <= MAX_LINES_OF.get(lesson_id, MAX_LINES)


@pytest.mark.parametrize(("old", "new"), [("4", "6"), ("6", "7")])
def test_steps_are_small(old, new):
    assert changed_lines(old, new) <= 40


def test_no_lesson_imports_another_file_of_the_course():
    for lesson_id in LESSONS:
        for node in ast.walk(ast.parse(source(lesson_id))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert not (ROOT / name.split(".")[0]).exists()
                assert not list(ROOT.glob(f"day*/{name}.py"))


def test_lessons_are_where_the_list_says():
    listed = {lesson["file"] for lesson in LESSONS.values()}
    assert listed == {str(path.relative_to(ROOT)) for path in ROOT.glob("day*/*.py")}
