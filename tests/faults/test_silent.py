"""Faults that give no error: which check finds each, and no alarm where there is no fault."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import silent
import torch
from support.forked_ranks import run_ranks
from support.run import ROOT, full, output_of

FILE = ROOT / "day2" / "SILENT.md"
PAGE = FILE.read_text()
IMPORTS = re.findall(r"`(import [^`]+)`", PAGE)
FUNCTIONS = re.findall(r"^```python\n((?:def|class) .*?)^```", PAGE, re.M | re.S)
EXACT, OFF = 1e-5, 1e-4  # gaps to what one process has: rounding, and another training


def table():
    """Return {fault: what finds it} of the page's table, but for those that an exercise has."""
    rows = re.findall(r"^\| (?!fault )(.*) \| (?!.*: exercise)(.*) \| (.*) \|$", PAGE, re.M)
    return {fault: found for fault, _, found in rows}


def gap(seen, alone):
    """Return the largest difference of two lists, as a share of the largest number: never tiny."""
    gap = max(abs(x - y) for x, y in zip(seen, alone, strict=True)) / max(map(abs, alone))
    assert gap < EXACT or gap > OFF
    return gap


def numbers(printed):
    """Return the losses, norms and rates of all steps, and the scores of all tests."""
    steps = re.findall(r"^([\d.]+) ([\d.]+) ([\d.]+)$", printed, re.M)
    return [list(map(float, x)) for x in (*zip(*steps), re.findall("^score (.*)$", printed, re.M))]


def finder(seen, alone, comparable):
    """Return what finds a fault: seen on all ranks, alone when one process runs this program.

    comparable: whether the losses would be those of one process without the fault.
    """
    if seen["says"]:
        if re.fullmatch(r"\d+ of (31|120) samples were not used exactly once\.", seen["says"]):
            return "counting"
        batch, what = re.fullmatch(r"After batch (\d+): (.+) on ranks .+", seen["says"]).groups()
        return f"{'at the start' if batch == '0' else 'the ranks'}: `{what}`"
    first, second = re.findall(r"^\d (\[.*)", seen["printed"], re.M)
    if first == second:
        return "two epochs"
    if not comparable:
        return "reading"
    both = [numbers(x["printed"]) for x in (seen, alone)]
    for what, mine, theirs in zip(("", ": its gradients", ": its rate", ": its test"), *both):
        if gap(mine, theirs) > (0 if "rate" in what else OFF):
            return f"one process{what}"
    return "reading"


@pytest.mark.parametrize("ranks", [full(2), 3])
def test_each_silent_fault_is_found_as_the_page_says(ranks, tmp_path):
    found = []
    for count in (ranks, 1):
        output = output_of(run_ranks(count, silent.__file__, FILE, cwd=tmp_path))
        found.append(json.loads(output.splitlines()[-1]))
    seen, alone = found
    found = {}
    for program, faults in silent.FAULTS.items():
        for x in (program, *faults):
            found[x] = finder(seen[x], alone[x], program not in ("dropout", "buffers"))
    assert found == table() | dict.fromkeys(silent.FAULTS, "reading")  # no false alarm
    assert "repeats False" not in seen["dropout"]["printed"]
    assert "repeats True" not in seen["a test without `eval()`"]["printed"]
    for fault in ("one rank skips a step", "an old checkpoint on one rank"):
        assert seen[fault]["says"].endswith(" on ranks [1].")


def test_one_bit_and_one_number_of_many_are_noticed():
    page = {"dist": SimpleNamespace(get_rank=lambda: 0)}
    exec("\n".join(IMPORTS[:4] + FUNCTIONS), page)
    for kind in (torch.uint8, torch.bfloat16, torch.float64, torch.int64, torch.complex64):
        tensor, other = torch.zeros(2, 2, 3, dtype=kind)
        other.view(torch.uint8)[-1, 0] = 1
        assert page["fingerprint"](tensor) != page["fingerprint"](other)
    assert page["fingerprint"](torch.arange(6)[1::2]) == page["fingerprint"](torch.arange(1, 6, 2))
    assert page["fingerprint"](torch.arange(6)) != page["fingerprint"](torch.arange(6).flip(0))
    seen = []
    page["check_ranks"] = lambda *given: seen.append(given[-1][0][1].tolist())
    for middle in (0, 1e-6):
        samples = np.zeros((3, 2000))
        samples[1, 1000] = middle
        page["check_data"](samples, "cpu")
    assert seen[0] != seen[1]
