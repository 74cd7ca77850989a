"""Faults that give no error: which check finds each, and no alarm where there is no fault."""

import json
import re

import pytest
from helpers import ROOT
from ranks import run_ranks
from silent import FAULTS

PROGRAM = ROOT / "tests" / "faults" / "silent.py"
FILE = ROOT / "day2" / "SILENT.md"
PAGE = FILE.read_text()
EXACT, OFF = 1e-5, 1e-2  # gaps to the losses of one process: rounding, and another training


def table():
    """Return {fault: (what finds it, what the check says)} of the page's table."""
    rows = [line[2:-2].split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return {row[0]: (row[2], row[3].strip(" `")) for row in rows if row[0] != "fault"}


def finder(seen, right):
    """Return what finds a fault, and what the check says, from what was seen with and without."""
    if seen["says"]:
        what = re.fullmatch(r"After batch \d+: (.+) on ranks \[[\d, ]+\]\.", seen["says"])[1]
        if what == "another batch number":
            return "the batch number", what
        samples = what == "another number of samples"
        return "the samples" if samples else "the fingerprint", what
    if "tested" in seen and seen["tested"] != right["tested"]:
        return "the samples", ""
    if right["gap"] < EXACT:  # without the fault, one process has the same losses
        assert seen["gap"] < EXACT or seen["gap"] > OFF
        return ("one process" if seen["gap"] > OFF else "reading"), ""
    return "reading", ""


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_each_silent_fault_is_found_as_the_page_says(ranks, tmp_path):
    status, output = run_ranks(ranks, PROGRAM, FILE, cwd=tmp_path)
    assert status == 0, output
    seen = json.loads(output.splitlines()[-1])
    programs = set(FAULTS.values())
    assert {x: seen[x]["says"] for x in programs} == dict.fromkeys(programs)  # no false alarm
    assert {x: finder(seen[x], seen[FAULTS[x]]) for x in FAULTS} == table()
    assert seen["plain"]["tested"] == 31
    comparable = programs - {"dropout", "buffers"}
    assert all(seen[x]["gap"] < EXACT for x in comparable)
    late, right = seen["`no_sync` around `backward` only"], seen["two batches a step"]
    assert late["messages"] == 2 * right["messages"] > 0
    assert seen["dropout"]["repeats"]
    assert not seen["a test without `eval()`"]["repeats"]
    for fault in ("one rank skips a step", "an old checkpoint on one rank"):
        assert seen[fault]["says"].endswith(" on ranks [1].")


def test_the_check_can_be_copied_from_the_page(tmp_path):
    """With the imports that the page names, and no others, into a script with a fault."""
    functions = re.findall(r"^```python\n(def .*?)^```", PAGE, re.M | re.S)
    assert len(functions) == 3
    script = [*re.findall(r"`(import [^`]+)`", PAGE), *functions]
    script += ['dist.init_process_group("gloo")', "rank = dist.get_rank()"]
    script += ["check_ranks(5 + (rank == 1), 8, torch.tensor([rank]), [])"]
    (tmp_path / "copy.py").write_text("\n".join(script))
    status, output = run_ranks(3, tmp_path / "copy.py", cwd=tmp_path)
    assert status == 1
    assert "After batch 5: another batch number on ranks [1].\n" in output
    assert "Traceback" not in output
