"""Lessons 15 and 17: what a library does, with Accelerate and with FSDP2, is what DDP does."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import ALONE, LESSONS, ROOT, cannot, losses, once, proof_of, proves, refusal, run
from mutants import assert_disproved, run_mutant, write_mutant
from ranks import run_ranks

FULL = pytest.mark.full
LESSON_15 = ROOT / LESSONS["15"]["file"]
LESSON_17 = ROOT / LESSONS["17"]["file"]


# Lesson 15: Accelerate


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=FULL), 3])
def test_lesson_15_takes_the_steps_of_ddp_on_any_number_of_ranks(ranks, tmp_path):
    status, output = run_ranks(ranks, LESSON_15, "--epochs", 5, cwd=tmp_path)
    assert f"ranks: {ranks}, device: cpu" in output
    assert float(re.search(r"losses within (\S+) of those without", output)[1]) < 1e-5
    # After so few steps it has not found the line, and says so.
    assert status == 1
    assert proof_of(output).endswith("of those without Accelerate (limit 1e-05): WRONG")
    # 2 steps an epoch on any number of ranks, of 500 points or a few less.
    curve = losses(tmp_path / "runs" / LESSON_15.stem)
    assert [points for points, _ in curve] == [500 // ranks * ranks * n for n in range(1, 11)]


def test_accelerate_launch_starts_lesson_15_too(tmp_path):
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", LESSON_15)
    status, output = run([str(x) for x in launch], 200, tmp_path, None)
    assert status == 0, output
    assert "ranks: 1, device: cpu" in output
    assert proves(output), output


@pytest.mark.parametrize(
    ("epochs", "line", "wrong", "says"),
    [
        (
            5,
            "accelerator.prepare(model, optimizer, loader)",
            "model, optimizer, loader",
            r"losses within \de(-0[1-3]|\+\d\d) of those without Accelerate",
        ),
        # Only the line is wrong: with Accelerate and without, the losses are the same.
        pytest.param(
            50,
            "TensorDataset(x, 0.7 * x + 0.3)",
            "TensorDataset(x, 0.7 * x + 0.4)",
            r"^=> y = 0.70 x \+ 0.40 \(limit",
            marks=FULL,
        ),
    ],
)
def test_lesson_15_says_that_it_is_wrong(epochs, line, wrong, says, tmp_path):
    output = run_mutant("15", [(line, wrong)], 2, "--epochs", epochs, cwd=tmp_path)
    assert_disproved(output, says)


# Lesson 17: FSDP2

CANNOT = r"^torch \S+ cannot shard on CPUs: use a newer one, or GPUs$"


def run_17(*arguments, **options):
    """Run the lesson on ranks; skip with its sentence where this version cannot shard."""
    return unless_it_cannot(*run_ranks(*arguments, **options))


def unless_it_cannot(status, output):
    if status == os.EX_UNAVAILABLE:
        # gloo has averaged since torch 2.8: only an older one may refuse.
        skip = pytest.skip if torch.__version__ < (2, 8) else cannot
        skip(re.search(CANNOT, output, re.M)[0])
    return status, output


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The output of 4 ranks, and the folder in which they left their checkpoint."""

    def run():
        folder = tmp_path_factory.mktemp("four")
        return *run_ranks(4, LESSON_17, "--max-steps", 12, cwd=folder), str(folder)

    status, output, folder = once(tmp_path_factory, "four", run)
    unless_it_cannot(status, output)
    assert status == 0, output
    return output, Path(folder)


def resume(folder, tmp_path, ranks):
    """Go on from a copy of a checkpoint; return the output."""
    shutil.copytree(folder / "runs", tmp_path / "runs")
    status, output = run_17(ranks, LESSON_17, "--resume", cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    return output


def megabytes(name, output):
    """Return what a rank holds with DDP or FSDP: parameters, gradients, states; inside a layer."""
    row = re.search(
        rf"^{name}, MB a rank: parameters ([\d.]+), gradients ([\d.]+), Adam's states ([\d.]+); "
        r"inside a layer parameters ([\d.]+)",
        output,
        re.M,
    )
    *between, inside = map(float, row.groups())
    return between, inside


def loss(name, epoch, output):
    return float(re.search(rf"^{name}, epoch {epoch}: loss ([\d.]+)", output, re.M)[1])


def test_four_ranks_hold_a_quarter_and_learn_the_same(four):
    output, folder = four
    assert proves(output), output
    (whole, whole_inside), (part, part_inside) = megabytes("DDP", output), megabytes("FSDP", output)
    for of_four, of_one in zip(part, whole, strict=True):
        assert of_four <= 0.27 * of_one
    # A layer is whole in its turn, the others are not.
    assert 2 * part[0] < part_inside < 0.7 * whole_inside
    assert loss("DDP", 0, output) == pytest.approx(loss("FSDP", 0, output), abs=2e-4)
    # It learns more than which characters are frequent.
    frequency = float(re.search(r"by frequency alone: loss ([\d.]+)", output)[1])
    assert loss("FSDP", 1, output) < 0.8 * frequency
    curve = losses(folder / "runs" / LESSON_17.stem)
    assert [pieces for pieces, _ in curve] == [32 * (step + 1) for step in range(24)]
    parts = sorted((folder / "runs" / LESSON_17.stem / "checkpoint").glob("*.distcp"))
    assert len(parts) == 4  # each rank has written its own
    sizes = [file.stat().st_size for file in parts]
    assert max(sizes) < 1.5 * min(sizes)


def test_two_ranks_go_on_where_four_stopped(four, tmp_path):
    before, folder = four
    output = resume(folder, tmp_path, 2)
    assert proof_of(output).startswith("=> 2 ranks go on where 4 stopped, losses within ")
    assert loss("resumed", 1, output) == pytest.approx(loss("FSDP", 1, before), abs=2e-4)
    half, quarter = megabytes("FSDP", output)[0], megabytes("FSDP", before)[0]
    assert half == pytest.approx([2 * x for x in quarter], abs=0.02)


@FULL
def test_three_ranks_and_then_one(tmp_path):
    """Three do not divide the parameters, nor the pieces of text."""
    three, one = tmp_path / "three", tmp_path / "one"
    three.mkdir()
    few = ("--max-steps", 3, "--batch-size", 2)
    status, output = run_17(3, LESSON_17, *few, cwd=three)
    assert status == 0, output
    assert "=> 3 ranks: parameters, gradients, Adam's states 0.34 of DDP's (limit 0.38)" in output
    output = resume(three, one, 1)
    assert proof_of(output).startswith("=> 1 ranks go on where 3 stopped")


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (1, f"runs/{LESSON_17.stem}/checkpoint holds no checkpoint: run the lesson without"),
        (3, "32 pieces a step cannot be divided evenly by 3"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_gets_one_sentence(
    ranks, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if ranks > 1:
        notes = tmp_path / "runs" / LESSON_17.stem / "checkpoint" / "notes.json"
        notes.parent.mkdir(parents=True)
        notes.write_text(json.dumps({"batch": 32}))
    status, output = refusal("17", "--resume", env=ALONE | {"WORLD_SIZE": str(ranks)})
    assert status == 2
    assert f"error: {sentence}" in output.strip().splitlines()[-1]


def test_a_torch_that_cannot_shard_is_refused(tmp_path):
    """gloo of older versions gives the sum, and Adam would hide that the gradients are wrong."""
    newer = ('hasattr(FSDPModule, "set_force_sum_reduction_for_comms")', "False")
    file = write_mutant(tmp_path, "17", newer)
    status, output = run_ranks(2, file, cwd=tmp_path)
    assert status == os.EX_UNAVAILABLE
    assert "Traceback" not in output
    assert len(re.findall(CANNOT, output, re.M)) == 1


def test_without_sharding_lesson_17_says_that_it_is_wrong(tmp_path):
    line = ("    shard(model, device)\n", "")
    output = run_mutant("17", [line], 2, "--max-steps", 2, cwd=tmp_path)
    assert_disproved(output, r"states 1\.00 of DDP's \(limit 0\.55\), .*: WRONG$")


@FULL
def test_weights_without_adams_states_do_not_go_on_where_they_stopped(four, tmp_path):
    shutil.copytree(four[1] / "runs", tmp_path / "runs")
    line = '    dcp.load({"model": weights, "optimizer": states}'
    wrong = '    dcp.load({"model": weights}'
    output = run_mutant("17", [(line, wrong)], 1, "--resume", cwd=tmp_path)
    says = r"^=> 1 ranks go on where 4 stopped, losses within \S+ \(limit 1e-05\): WRONG$"
    assert_disproved(output, says)
