"""The pages of the lessons: each has the same parts, and what it says can be done."""

import re
from pathlib import Path

import pytest
import torch
from boxes import USUAL, changed, hunks, section
from helpers import LESSONS, ROOT
from course.lists import read_pages
from docs.glossary import link_terms
from docs.pages import PAGES, PART
from ranks import run_ranks

SECTIONS = ["Predict", "The idea", "Run", "What happened", "The change", "In your own script"]
SECTIONS += ["Check yourself", "Exercises", "Further reading"]
WITH_BOX = ["4", "6", "7", "8", "10", "11", "12", "13", "16", "17"]
OF_LESSONS = {x["id"]: x["file"] for x in read_pages() if "id" in x}


def read(page):
    return (ROOT / page).read_text()


def prose(text):
    """Return a page's text without made parts, code, headings, tables, pictures and links."""
    text = PART.sub("", text)
    text = re.sub(r"^ *```.*?^ *```$|^(?:#|\|).*?$", "", text, flags=re.M | re.S)
    return re.sub(r"!\[[^\]]*\]\([^)]*\)|(?<=\])\([^)]*\)|<[^>]*>", "", text)


@pytest.mark.parametrize("name", OF_LESSONS)
def test_a_lesson_has_a_page_with_all_its_parts(name):
    text = read(OF_LESSONS[name])
    wanted = [x for x in SECTIONS if x != "In your own script" or name in WITH_BOX]
    assert re.findall(r"^## (.*)$", text, re.M) == wanted
    first = LESSONS[name]
    assert text.startswith("# ")
    assert re.search(r"^\*\*[^*]+\?\*\*$", text.partition("\n## ")[0], re.M), "no question"
    assert len(re.findall(r"^\d\. ", section(text, "Predict"), re.M)) in (2, 3)
    idea = section(text, "The idea")
    (alt, picture), *_ = re.findall(r"!\[([^\]]*)\]\(\.\./slides/figures/([\w.]+)\)", idea)
    assert len(alt.split()) >= 5, alt
    assert (ROOT / "slides" / "figures" / picture).exists()
    shown = [body for _, kind, _, body, _ in PART.findall(idea) if kind == "code"]
    assert shown, "no excerpt"
    assert all(4 <= len(body.splitlines()) - 2 <= 16 for body in shown)
    run = section(text, "Run")
    assert first["file"] in run or f" {name}" in run
    output = PART.search(run)[4]
    assert output.startswith("<details>\n")
    assert "\n=> " in output
    change = section(text, "The change")
    has_diff = "parent" in first and not first.get("new")
    assert ("```diff\n" in change) == has_diff
    assert "<details>" not in change
    check = section(text, "Check yourself")
    answers = re.findall(
        r"   <details><summary>Answer</summary>\n\n.+?\n\n   </details>$", check, re.M | re.S
    )
    assert re.findall(r"^(\d)\. .+\?", check, re.M) == ["1", "2", "3"]
    assert len(answers) == 3
    assert 1 <= len(re.findall(r"\]\(https://", section(text, "Further reading"))) <= 4


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 120


@pytest.mark.parametrize("page", OF_LESSONS.values())
def test_words_are_explained_where_they_are_first_used(page):
    assert link_terms(read(page), page) == read(page), "python scripts/update_docs.py"


def links(page):
    """Return the pages to which a page leads."""
    text = re.sub(r"^ *```.*?^ *```$", "", read(page), flags=re.M | re.S)
    targets = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]+\.md)", text)
    return {str(Path(page).parent / target) for target in targets}


def test_every_page_is_reached_in_two_clicks():
    near = {str((ROOT / x).resolve().relative_to(ROOT)) for x in links("README.md")}
    far = {str((ROOT / x).resolve().relative_to(ROOT)) for page in near for x in links(page)}
    assert set(PAGES) - near - far == {"README.md"} - far


# What a rank prints at the end: whether all of its parameters are those of rank 0.
SAME = r"""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    both = [None, None]
    dist.all_gather_object(both, mine)
    print(f"same parameters: {torch.equal(*both)}\n", end="")  # in one piece
"""


@pytest.mark.parametrize("name", [x for x in WITH_BOX if x != "10"])
def test_the_box_changes_a_usual_script(name, tmp_path):
    if name == "17" and torch.__version__ < (2, 8):
        pytest.skip("this torch cannot shard on CPUs")
    script = USUAL.read_text()
    if name not in ("4", "6"):
        script = changed(script, OF_LESSONS["6"])
    before, script = script, changed(script, OF_LESSONS[name])
    added = [line for lines in hunks(OF_LESSONS[name]) for line in lines if line[:1] == "+"]
    assert 3 <= len([line for line in added if line.strip("+ ")]) <= 18
    assert script != before
    if name != "17":  # there a parameter is spread over the ranks
        end = "    dist.destroy_process_group()\n"
        place = script.rindex(end) if end in script else script.index("\n\nif __name__")
        script = script[:place].rstrip("\n") + "\n" + SAME.strip("\n") + "\n" + script[place:]
    train = tmp_path / "train.py"
    train.write_text(script)
    status, output = run_ranks(2, train, cwd=tmp_path)
    assert status == 0, output
    assert output.count("same parameters: True") == (0 if name == "17" else 2), output
    assert "same parameters: False" not in output
    losses = [float(x) for x in re.findall(r"epoch 2: loss ([\d.]+)", output)]
    assert losses
    assert max(losses) < 0.5  # it has learned: at first the loss is 0.69


def test_the_arithmetic_of_the_examples_is_right():
    """Each line of Python in CHOOSE.md ends with its result, as far as it is written out."""
    blocks = re.findall(r"^```python\n(.*?)^```", read("day2/CHOOSE.md"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 10
    for line in lines:
        calculation, result = re.fullmatch(r"([\d. e*/()+-]+) # ([\d.]+) .*", line).groups()
        decimals = len(result.partition(".")[2])
        assert round(eval(calculation), decimals) == float(result), line
