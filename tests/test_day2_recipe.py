"""Lesson 13: the same training however the batch is made up, and every test image counted once."""

import math
import re
from pathlib import Path

import pytest
import torch
from helpers import LESSONS, ROOT, losses, once, proof_of, proves, same_losses
from mutants import write_mutant
from ranks import run_ranks

FULL = pytest.mark.full
LESSON = ROOT / LESSONS["13"]["file"]
RUNS = Path("runs", LESSON.stem)
TESTED = ", 10,000 of 10,000 tested as by one process: ok"


def made_of(batch_size, accumulate, ranks):
    """Return options for steps of so many batches, with the learning rate 0.05 for the step."""
    rate = 0.05 / accumulate / ranks
    few = ("--epochs", 2, "--max-steps", 6, "--warm-up", 4)
    return ("--batch-size", batch_size, "--accumulate", accumulate, "--lr", rate, *few)


def curve(folder):
    return [loss for _, loss in losses(folder / RUNS)]


def accuracies(output):
    return [float(x) for x in re.findall(r"test accuracy: ([\d.]+)%", output)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process prints with one batch of 48 a step, and its losses."""

    def run():
        path = tmp_path_factory.mktemp("one")
        status, output = run_ranks(1, LESSON, *made_of(48, 1, 1), cwd=path)
        return status, output, curve(path)

    status, output, expected = once(tmp_path_factory, "lesson_13_one", run)
    assert status == 0, output
    return output, expected


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "ranks"),
    [
        (8, 2, 3),
        pytest.param(12, 4, 1, marks=FULL),
    ],
)
def test_ranks_and_accumulation_learn_what_the_big_batch_does(
    batch_size, accumulate, ranks, one, tmp_path
):
    """And 3 ranks test 10,000 images that they cannot divide evenly."""
    few = made_of(batch_size, accumulate, ranks)
    status, output = run_ranks(ranks, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    setting = f"global batch {batch_size} x {accumulate} x {ranks}, highest learning rate 0.05\n"
    assert setting in output
    assert TESTED in proof_of(output)
    assert same_losses(curve(tmp_path), one[1])
    assert accuracies(output) == pytest.approx(accuracies(one[0]), abs=0.05)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=FULL)])
def test_fewer_bits_change_the_losses_a_little(precision, tmp_path):
    few = (*made_of(24, 2, 1), "--precision", precision)
    status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert proof_of(output).startswith(f"=> {precision}: losses within ")
    assert proves(output), output
    assert "within 0e+00 of one process" not in output
    assert "Warning" not in output


def test_checkpoints_hold_all_that_goes_on_and_the_rate_rises_and_falls(tmp_path):
    few = ("--epochs", 5, "--max-steps", 3, "--accumulate", 1, "--warm-up", 6, "--lr", 0.04)
    status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    for epoch in range(5):
        file = tmp_path / RUNS / f"checkpoint_epoch_{epoch}.pt"
        state = torch.load(file, weights_only=True)
        file.unlink()
        assert state["epoch"] == epoch
        step = 3 * (epoch + 1)
        warm_up = min(1, 0.1 + 0.9 * step / 6)
        decay = (1 + math.cos(math.pi * step / 15)) / 2
        (group,) = state["optimizer"]["param_groups"]
        assert group["lr"] == pytest.approx(0.04 * warm_up * decay)
        assert all("momentum_buffer" in x for x in state["optimizer"]["state"].values())
        assert [x["last_epoch"] for x in state["scheduler"]["_schedulers"]] == [step, step]
    assert all("tfevents" in x.name for x in (tmp_path / RUNS).iterdir())  # nothing half written


def test_the_ranks_average_once_a_step(tmp_path):
    """In steps of 3 batches each. The proof line cannot tell: the losses are the same."""
    wrap = "    ddp_model = DistributedDataParallel(model)\n"
    told = """
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    ddp_model.register_comm_hook(None, lambda _, bucket: print("sent") or noop_hook(_, bucket))
"""
    few = ("--epochs", 1, "--max-steps", 4, "--accumulate", 3)
    mutant = write_mutant(tmp_path, "13", (wrap, wrap + told))
    status, output = run_ranks(1, mutant, *few, cwd=tmp_path)
    assert status == 0, output
    assert output.count("sent\n") == 4
