"""The lesson contract: scripts that stand alone and yet are one course."""

import ast
import difflib
import re
import tomllib

import pytest
from helpers import LESSONS, ROOT, proof_of, recorded_output

COURSE = tomllib.loads((ROOT / "scripts" / "course.toml").read_text())
RULER = "# ---- The same in every lesson that has it; explained on the page of the first one"
MAX_LINES = {"day1": 120, "day2": 152}  # above the ruler
MAX_COLUMNS = 88
KEY_WITHIN = 45  # lines, from the end of the docstring to what is new
FIELDS = ["Builds on:", "New here:", "Run:", "Look for:", "Try next:"]
LOOP = ["train_one_epoch", "train", "main"]
# How many lines above the ruler may differ from the lesson before, deleted and added.
MAX_CHANGED = {("3", "4"): 42, ("4", "6"): 27, ("6", "7"): 75, ("6", "8"): 52, ("8", "10"): 25}
MAX_CHANGED |= {("10", name): 120 for name in ("11", "12", "13", "16")}


def source(lesson_id):
    return (ROOT / LESSONS[lesson_id]["file"]).read_text()


def is_function(node):
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def functions(lesson_id):
    """Return {name: text} of a lesson's functions and classes, decorators and comments included."""
    lines = source(lesson_id).splitlines()
    result = {}
    for node in ast.parse(source(lesson_id)).body:
        if is_function(node):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            result[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return result


def parts(lesson_id):
    """Return the names of the functions above the ruler, and of those below it."""
    text = source(lesson_id)
    ruler = text.splitlines().index(RULER) + 1
    nodes = [node for node in ast.parse(text).body if is_function(node)]
    above = [node.name for node in nodes if node.lineno < ruler]
    return above, [node.name for node in nodes if node.lineno > ruler]


def lines_above(lesson_id):
    """Return a lesson's lines from the end of the docstring to the ruler."""
    lines = source(lesson_id).splitlines()
    return lines[ast.parse(source(lesson_id)).body[0].end_lineno : lines.index(RULER)]


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_functions_differ_from_earlier_lessons_only_as_declared(lesson_id):
    lesson, mine = LESSONS[lesson_id], functions(lesson_id)
    # The parent's version counts; where the parent has none, that of its nearest ancestor.
    known, ancestor = {}, lesson.get("parent")
    while ancestor is not None:
        known = functions(ancestor) | known
        ancestor = LESSONS[ancestor].get("parent")
    assert sorted(mine.keys() - known.keys()) == sorted(lesson["adds"])
    different = [name for name in mine if name in known and mine[name] != known[name]]
    assert sorted(different) == sorted(lesson["changes"])


def test_what_lessons_share_is_the_same_to_the_letter():
    """Each function below the ruler has one form, but for the few that are declared."""
    forms = {}
    for lesson_id in LESSONS:
        text = functions(lesson_id)
        for name in parts(lesson_id)[1]:
            forms.setdefault(name, {}).setdefault(text[name], []).append(lesson_id)
    several = {name: len(texts) for name, texts in forms.items() if len(texts) > 1}
    declared = {"parse_args": several.pop("parse_args")}
    assert several == COURSE["forms"]
    assert declared["parse_args"] > 10  # each lesson has its own arguments
    assert sum(len(texts) == 1 for texts in forms.values()) > 25


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_the_idea_stands_first(lesson_id):
    lesson = LESSONS[lesson_id]
    text = source(lesson_id)
    assert text.count("# ----") == 1
    above, below = parts(lesson_id)
    assert [name for name in above if name in LOOP] == [name for name in LOOP if name in above]
    assert above[-1] == "main"
    assert set(below) <= set(COURSE["order"]), "order, in scripts/course.toml, lacks a function"
    assert below == [name for name in COURSE["order"] if name in below]
    lines = lines_above(lesson_id)
    height = text.splitlines().index(RULER)
    assert height <= MAX_LINES[lesson["file"].split("/")[0]]
    # The first line of code, after the imports, that the lesson before does not have.
    earlier = lines_above(lesson["parent"]) if "parent" in lesson else []
    matcher = difflib.SequenceMatcher(None, earlier, lines, autojunk=False)
    new = [
        j for tag, _, _, j1, j2 in matcher.get_opcodes() if tag != "equal" for j in range(j1, j2)
    ]
    new = [j + 1 for j in new if lines[j] and not lines[j].startswith(("from ", "import "))]
    assert new[:1] <= [KEY_WITHIN]


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_lines_are_short(lesson_id):
    long = [line for line in source(lesson_id).splitlines() if len(line) > MAX_COLUMNS]
    assert long == []


@pytest.mark.parametrize(("old", "new"), MAX_CHANGED)
def test_steps_are_small(old, new):
    """As git diff --numstat counts, above the ruler, without the docstring."""
    diff = difflib.unified_diff(lines_above(old), lines_above(new), n=0, lineterm="")
    changed = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    print(f"{old} -> {new}: {len(changed)} lines")
    assert len(changed) <= MAX_CHANGED[old, new]


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
    # The shape of the proof line, not its values: the reader is asked to predict those.
    shape = re.escape(values["Look for"].strip()).replace(re.escape("..."), ".+")
    assert re.fullmatch(shape, proof_of(recorded_output(lesson_id)))
    assert "..." in values["Look for"]


def to_try(lesson_id):
    """Return what the docstring and the page say to try: texts with options in them."""
    page = (ROOT / LESSONS[lesson_id]["file"]).with_suffix(".md").read_text()
    page = re.sub(r"<!-- begin .*?<!-- end -->", "", page, flags=re.DOTALL)
    try_next = re.search(r"^Try next: (.*)", source(lesson_id), re.MULTILINE)[1]
    return [try_next, *re.findall("`(--[^`]+)`", page)]


@pytest.mark.parametrize("lesson_id", LESSONS)
def test_the_options_to_try_are_there(lesson_id):
    added = re.findall(r'\badd\(\s*"(--[\w-]+)"(?:.*type=(\w+))?', source(lesson_id))
    kinds = {"int": int, "positive_int": int, "positive_float": float}
    kind_of = {option: kinds.get(name, str) for option, name in added}
    others = (ROOT / "scripts" / "multinode_setup_and_run.sh").read_text()
    others += source("create_mnist_h5") + source("create_ratings")
    others = set(re.findall(r"--[a-z][\w-]*", others))
    for text in to_try(lesson_id):
        for option, value in re.findall(r"(--[\w-]+)(?: (\d[\d.]*)\b)?", text):
            assert option in kind_of or option in others, text
            kind_of.get(option, str)(value or 1)


def test_most_lessons_have_options_to_try():
    found = [name for name in LESSONS if any("--" in text for text in to_try(name))]
    assert len(found) > len(LESSONS) / 2


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
                assert not list(ROOT.glob(f"day*/**/{name}.py"))
                assert not list(ROOT.glob(f"scripts/**/{name}.py"))


def test_lessons_are_where_the_list_says():
    listed = {lesson["file"] for lesson in LESSONS.values()}
    assert listed == {str(path.relative_to(ROOT)) for path in ROOT.glob("day*/*.py")}
