"""The texts: commands can be typed, links lead somewhere, and what is made is up to date."""

import re
import sys

import pytest
import records
from docs.pages import DECKS, PAGES
from support.documented_commands import FENCE, check, commands_in
from support.run import LESSONS, ROOT, output_of, run


def read(file):
    return (ROOT / file).read_text()


@pytest.mark.parametrize("page", [*PAGES, *DECKS])
def test_the_programs_take_the_commands(page):
    for command in dict.fromkeys(commands_in(read(page))):
        try:
            check(command)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{page}: {command}\n{error}")


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_takes_the_command_of_its_docstring(name):
    text = re.sub(r"\\\n *", "", read(LESSONS[name]["file"]))
    (command,) = re.findall(r"^Run: +(.*)$", text, re.M)
    check(re.sub(r"[\[\]]", "", command.replace("[processes]", "2")))


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    made = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<\w+ id="([\w-]+)"', text))


@pytest.mark.parametrize("page", [*PAGES, *DECKS])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(page))):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("script", ["scripts/update_docs.py", "slides/figures/draw.py"])
def test_blocks_and_figures_are_up_to_date(script):
    said = output_of(run([sys.executable, ROOT / script, "--check"], 200, ROOT, None))
    if "Not compared" in said:
        pytest.skip(said)


@pytest.mark.parametrize("page", ["CHOOSE.md", "16_*.md", "17_*.md", "18_*.md"])
def test_what_a_page_works_out_is_right(page):
    (path,) = (ROOT / "day2").glob(page)
    worked_out = re.findall(r"^([\d(][\d /*+().e-]+)  # ([\d.]+)", path.read_text(), re.M)
    assert len(worked_out) > 2
    for formula, result in worked_out:
        found = eval(formula)  # noqa: S307, of digits and signs only
        assert f"{found:.{len(result.partition('.')[2])}f}" == result, formula


def test_a_record_names_no_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "nodes_of_allocation", lambda: ["node-a17"])
    output = f"in {tmp_path} on node-a17.site.edu, see /home/me/torch/x.py\n"
    result = {"output": output, "seconds": 1.2, "showed": "=> ok"}
    note = records.make_note("python x.py", result, "4 x Some GPU", tmp_path, "")
    assert note["output"] == ["in . on node1, see x.py"]
