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


def test_a_record_is_of_the_code_that_it_shows():
    code = '"""Doc."""\nx = 1  # one\n\n\ndef f():\n    """Doc."""\n    return f"{x}#"\n'
    assert records.bare(code) == 'x = 1\ndef f():\n    return f"{x}#"'
    lessons = {"4": LESSONS["4"], "4.wrong": LESSONS["4"] | {"change": ("import time\n", "")}}
    lessons["4.short"] = LESSONS["4"] | {"arguments": ["--max-steps", "30"]}
    codes = {records.digest(x, lessons) for x in lessons.values()}
    assert len(codes) == 3
    same = {"4": {"code": records.digest(LESSONS["4"], lessons)}, "4.wrong": {"code": "other"}}
    assert records.stale(same, lessons) == ["4.wrong", "4.short"]
    old = ["epoch 0: loss 0.5270, 13,537 images/s", "=> parameters identical: ok"]
    for new, differs in {
        "epoch 0: loss 0.5271, 9 images/s": "",
        "epoch 0: loss 0.5470, 9 images/s": "0.5270 before, 0.5470 now",
        "epoch 0: mean loss 0.5270, 9 images/s": "a line like this is only in one of them: e",
    }.items():
        found = records.difference(old, [new, old[1]])
        assert found.startswith(differs)
        assert bool(found) == bool(differs)
