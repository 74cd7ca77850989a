"""Lessons 15 and 17: what a library does, with Accelerate and with FSDP2, is what DDP does."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import LESSONS, ROOT, once, proof_of, proves, run
from mutants import assert_disproved, run_mutant, write_mutant
from ranks import run_ranks, skip_what_cannot_run

LESSON_17 = ROOT / LESSONS["17"]["file"]
CHECKPOINT = Path("runs", LESSON_17.stem, "checkpoint")


def test_accelerate_launch_starts_lesson_15_too(tmp_path):
    lesson_15 = str(ROOT / LESSONS["15"]["file"])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", lesson_15]
    status, output = run(launch, 200, tmp_path, None)
    assert status == 0, output
    assert "ranks: 1, device: cpu" in output
    assert proves(output), output


# Lesson 17: FSDP2


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The output of 4 ranks, and the folder in which they left their checkpoint."""

    def run():
        folder = tmp_path_factory.mktemp("four")
        return *run_ranks(4, LESSON_17, "--max-steps", 12, cwd=folder), str(folder)

    status, output, folder = once(tmp_path_factory, "four", run)
    skip_what_cannot_run(status, output)
    assert status == 0, output
    return output, Path(folder)


def megabytes(name, output):
    """Return what a rank holds with DDP or FSDP: parameters, gradients, states; inside a layer."""
    row = re.search(rf"^{name}, MB a rank: (.*); inside a layer (.*)$", output, re.M)
    between, inside = [[float(x) for x in re.findall(r"[\d.]+", part)] for part in row.groups()]
    return between, inside[0]


def loss(name, epoch, output):
    return float(re.search(rf"^{name}, epoch {epoch}: loss ([\d.]+)", output, re.M)[1])


def test_four_ranks_hold_a_quarter_and_learn(four):
    output, folder = four
    assert proves(output), output
    (whole, whole_inside), (part, part_inside) = megabytes("DDP", output), megabytes("FSDP", output)
    for of_four, of_one in zip(part, whole, strict=True):
        assert of_four <= 0.27 * of_one
    # A layer is whole in its turn, the others are not.
    assert 2 * part[0] < part_inside < 0.7 * whole_inside
    assert loss("FSDP", 1, output) < 1.88  # 2.35 if one knows only how frequent each character is
    assert len(list((folder / CHECKPOINT).glob("*.distcp"))) == 4  # each rank writes its own


def test_two_ranks_go_on_where_four_stopped(four, tmp_path):
    before, folder = four
    shutil.copytree(folder / "runs", tmp_path / "runs")
    status, output = run_ranks(2, LESSON_17, "--resume", cwd=tmp_path)
    assert status == 0, output
    assert proof_of(output).startswith("=> 2 ranks go on where 4 stopped, losses within ")
    assert loss("resumed", 1, output) == pytest.approx(loss("FSDP", 1, before), abs=2e-4)


@pytest.mark.full
def test_weights_without_adams_states_do_not_go_on_where_they_stopped(four, tmp_path):
    shutil.copytree(four[1] / "runs", tmp_path / "runs")
    change = ('dcp.load({"model": weights, "optimizer": states}', 'dcp.load({"model": weights}')
    output = run_mutant("17", change, 1, "--resume", cwd=tmp_path)
    says = r"^=> 1 ranks go on where 4 stopped, losses within \S+ \(limit 1e-05\): WRONG$"
    assert_disproved(output, says)


def test_a_torch_that_cannot_shard_is_refused(tmp_path):
    """gloo of older versions gives the sum, and Adam would hide that the gradients are wrong."""
    newer = ('hasattr(FSDPModule, "set_force_sum_reduction_for_comms")', "False")
    status, output = run_ranks(2, write_mutant(tmp_path, "17", newer), cwd=tmp_path)
    assert status == os.EX_UNAVAILABLE
    assert "Traceback" not in output
    sentence = r"^torch \S+ cannot shard here: take 2.8 or newer$"
    assert len(re.findall(sentence, output, re.M)) == 1  # of one rank
