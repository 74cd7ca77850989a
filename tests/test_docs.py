"""The texts: commands can be typed, links lead somewhere, and what is made is up to date."""

import ast
import itertools
import re
import sys

import pytest
from commands import FENCE, check, commands_in
from docs import recordings
from docs.blocks import BLOCK, Course, fill
from docs.excerpts import DIVIDING_LINE
from docs.pages import DECKS, PAGES, page_of
from helpers import LESSONS, ROOT, proof_of, recorded_output, run

COURSE = Course()
PAGE_OF = {x["id"]: x["file"] for x in COURSE.pages if "id" in x}
by_lesson = pytest.mark.parametrize("name", LESSONS)


def read(file):
    return (ROOT / file).read_text()


# Commands and links


@pytest.mark.parametrize("page", [*PAGES, *DECKS])
def test_the_programs_take_the_commands(page):
    for command in dict.fromkeys(commands_in(read(page))):
        try:
            check(command)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{page}: {command}\n{error}")


@by_lesson
def test_a_lesson_takes_the_command_of_its_docstring(name):
    text = re.sub(r"\\\n *", "", read(LESSONS[name]["file"]))
    (command,) = re.findall(r"^Run: +(.*)$", text, re.M)
    check(re.sub(r"[\[\]]", "", command.replace("[processes]", "2")))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python day1/4_mnist_manual_ddp.py 2 --epoch-s 3", "unrecognized arguments"),
        ("DIST_TIMEOUT=9 python day1/4_mnist.py", "there is no day1/4_mnist.py"),
        ("salloc scripts/multinode_setup_and_run.sh --locale 2 9", "There is no option --locale"),
        ("scripts/doctor.sh --locale 2x1 | tail", "knows no --locale"),
        ("cd course && torchrun day1/6_mnist_ddp_pt.py --epochs", "expected one argument"),
    ],
)
def test_a_wrong_command_is_refused(command, says):
    with pytest.raises(AssertionError, match=says):
        check(command)


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    made = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", [*PAGES, *DECKS])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(page))):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


# What is made


@pytest.mark.parametrize("script", ["scripts/update_docs.py", "slides/figures/draw.py"])
def test_blocks_and_figures_are_up_to_date(script):
    status, said = run([sys.executable, ROOT / script, "--check"], 200, ROOT, None)
    assert status == 0, said
    if "Not compared" in said:
        pytest.skip(said)


def block(mark, page="slides/day1.md", course=COURSE):
    """Return what is put between two marks."""
    begin, end = f"<!-- begin {mark} -->\n", "<!-- end -->\n"
    text = fill(f"{begin}old\n{end}", page, course)
    return text.removeprefix(begin).removesuffix(end)


def test_a_block_shows_what_its_mark_says():
    lines = block('output 6 "test" "=" mark "="').splitlines()
    shown = [x for x in recorded_output("6").splitlines() if x.startswith(("test", "=>"))]
    assert lines == ["```console {3}", "$ python day1/6_mnist_ddp_pt.py", *shown, "```"]
    assert "#" in block("code 4 average_gradients", "day1/4_mnist_manual_ddp.md")
    assert "#" not in block("code 4 average_gradients")


def test_a_number_in_a_sentence_is_that_of_the_output():
    mark = '<!-- n 4 "accuracy: (\\S+)%" -->'
    text = fill(f"It is {mark}?<!-- /n -->%.\n", "day1/4_mnist_manual_ddp.md", COURSE)
    number = re.search(r"accuracy: (\S+)%", recorded_output("4"))[1]
    assert text == f"It is {mark}{number}<!-- /n -->%.\n"
    with pytest.raises(ValueError, match="nothing"):
        fill(text.replace("accuracy", "nothing"), "day1/4_mnist_manual_ddp.md", COURSE)
    double = text.replace(" n 4", ' n "2 * a + b" ".2f" 4 "accuracy: (.*)%" 4')
    wanted = 3 * float(number)
    assert f"-->{wanted:.2f}<!--" in fill(double, "day1/4_mnist_manual_ddp.md", COURSE)


@pytest.mark.parametrize("page", ["day2/CHOOSE.md", PAGE_OF["20"]])
def test_what_a_page_works_out_is_right(page):
    worked_out = re.findall(r"^([\d(][\d /*+().e-]+)  # ([\d.]+)", read(page), re.M)
    assert len(worked_out) > 2
    for formula, result in worked_out:
        found = eval(formula)  # noqa: S307, of digits and signs only
        assert f"{found:.{len(result.partition('.')[2])}f}" == result, formula


@pytest.mark.parametrize("mark", ["code 4 nothing", "output 99", "output 6 'none'", "foot", "what"])
def test_a_mark_of_nothing_is_named(mark):
    with pytest.raises(ValueError, match=f"slides/day1.md: .*<!-- begin {mark} -->"):
        block(mark)


def test_a_record_names_no_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(recordings, "nodes_of_allocation", lambda: ["node-a17"])
    output = f"in {tmp_path} on node-a17.site.edu, see /home/me/torch/x.py\n"
    result = {"output": output, "seconds": 1.2, "showed": "=> ok"}
    note = recordings.note("python x.py", result, "4 x Some GPU", tmp_path)
    assert note["output"] == ["in . on node1, see x.py"]


@pytest.mark.parametrize("page", PAGES)
def test_each_folded_block_has_its_end(page):
    assert read(page).count("<details>") == read(page).count("</details>")


def test_each_figure_is_shown():
    text = "".join(read(page) for page in [*PAGES, *DECKS])
    for figure in ROOT.glob("slides/figures/*.svg"):
        assert f"figures/{figure.name})" in text


# Each lesson in its places

SECTIONS = [
    "Predict",
    "Run",
    "What happened",
    "The idea",
    "The change",
    "In your own script",  # not on each page
    "Check yourself",
    "What to remember",
    "Exercises",
    "Further reading",
]


@pytest.mark.parametrize("name", PAGE_OF)
def test_a_lesson_has_its_places(name):
    text = read(PAGE_OF[name])
    assert re.search(r"^\*\*[^*]+\?\*\*$", text.partition("\n## ")[0], re.M), "no question"
    sections = re.findall(r"^## (.*)$", text, re.M)
    assert sections == [x for x in SECTIONS if x != "In your own script" or x in sections]
    blocks = {(kind, *words.split()[:1]) for _, kind, words, *_ in BLOCK.findall(text)}
    assert {("head", name), ("output", name), ("exercises", name), ("foot", name)} <= blocks
    assert text.count("<details><summary>Answer</summary>") == 3
    page = page_of(name, COURSE.pages)
    if page["taught"]:
        assert f"<!-- begin here {name} -->" in read(f"slides/{page['day']}.md")


def test_each_script_is_in_the_list_and_each_lesson_in_a_timetable():
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("day*/*.py")}
    assert files - {"day1/usual_script.py"} == {lesson["file"] for lesson in LESSONS.values()}
    parts = itertools.chain(*(day["parts"] for day in COURSE.days.values()))
    taught = [part["page"] for part in parts if part.get("page") in LESSONS]
    assert sorted(taught) == sorted(set(LESSONS) - {"create_ratings", "14", "15"})  # at home


# The contract of the lessons

ABOVE = {"day1": 109, "day2": 154}  # lines above the dividing line, at most
WHOLE = {
    "0": 70,
    "1": 176,
    "6": 255,
    "9": 178,
    "10": 233,
    "11": 396,
    "12": 360,
    "13": 623,
    "17": 357,
    "19": 362,
    "20": 357,
}
WHOLE_OF_DAY = {"day1": 292, "day2": 350}  # and of the others, whole
FIELDS = ["Builds on", "New here", "Run", "Look for", "Try next"]
# Functions that may have more forms. Lesson 4's own loop sends: rank 0 cannot use it alone.
FORMS = {"evaluate": 2, "Net": 5, "gap_to_one_process": 2}


@by_lesson
def test_the_idea_comes_first_and_is_short(name):
    file = LESSONS[name]["file"]
    day = file.partition("/")[0]
    text = read(file)
    assert text.count("\n") <= WHOLE.get(name, WHOLE_OF_DAY[day])
    if name == "0":  # raw: it has no helpers
        return
    above, *below = text.split(DIVIDING_LINE)
    assert len(below) == 1
    if name != "13":  # it is copied whole
        assert above.count("\n") < ABOVE[day]
    assert "\ndef main(" in above


def test_what_lessons_share_is_identical():
    forms = {}
    for lesson in LESSONS.values():
        below = read(lesson["file"]).partition(DIVIDING_LINE)[2]
        for node in ast.parse(below).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                forms.setdefault(node.name, set()).add(ast.get_source_segment(below, node))
    several = {name: len(texts) for name, texts in forms.items() if len(texts) > 1}
    assert several.pop("parse_args") > 10
    assert several == FORMS


@by_lesson
def test_the_docstring_has_its_headings_and_the_proof_line(name):
    lines = ast.get_docstring(ast.parse(read(LESSONS[name]["file"]))).splitlines()
    values = dict(line.split(": ", 1) for line in lines[2:] if re.match(r"\w", line))
    assert list(values) == FIELDS
    # The shape of the proof line, not its values: the reader is asked to predict those.
    shape = re.escape(values["Look for"].strip()).replace(re.escape("..."), ".+")
    assert re.fullmatch(shape, proof_of(recorded_output(name)))
