"""Lesson 13: the same training however the batch is made up, and every test image counted once."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import LESSONS, ROOT, load_lesson, losses, once, proof_of, proves, same_losses
from mutants import assert_disproved, run_mutant, write_mutant
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torchvision.datasets import MNIST

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


def checkpoints(folder, epochs):
    files = [folder / RUNS / f"checkpoint_epoch_{epoch}.pt" for epoch in range(epochs)]
    return [torch.load(file, weights_only=True) for file in files]


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
        pytest.param(24, 1, 2, marks=FULL),
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


def test_checkpoints_hold_what_was_tested_and_all_that_goes_on(tmp_path):
    few = ("--epochs", 2, "--max-steps", 30, "--check-every", 10)
    status, output = run_ranks(2, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert TESTED in proof_of(output)
    lesson = load_lesson("13")
    test_set = MNIST(ROOT / "data", train=False)
    for epoch, state in enumerate(checkpoints(tmp_path, 2)):
        assert state["epoch"] == epoch
        model = lesson.Net()
        model.load_state_dict(state["model"])
        with torch.no_grad():
            right = (model(test_set.data).argmax(dim=1) == test_set.targets).float().mean().item()
        assert accuracies(output)[epoch] / 100 == pytest.approx(right, abs=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        optimizer.load_state_dict(state["optimizer"])
        assert all("momentum_buffer" in x for x in optimizer.state.values())
        warm_up, decay = state["scheduler"]["_schedulers"]
        assert warm_up["last_epoch"] == decay["last_epoch"] == 30 * (epoch + 1)
    left = {x.name for x in (tmp_path / RUNS).iterdir() if "tfevents" not in x.name}
    assert left == {"checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt"}


def test_the_rate_rises_and_then_falls_to_zero(tmp_path):
    few = ("--epochs", 5, "--max-steps", 3, "--accumulate", 1, "--warm-up", 6, "--lr", 0.04)
    status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    states = checkpoints(tmp_path, 5)
    rates = [state["optimizer"]["param_groups"][0]["lr"] for state in states]
    for step, rate in zip((3, 6, 9, 12, 15), rates, strict=True):
        warm_up = min(1, 0.1 + 0.9 * step / 6)
        decay = (1 + math.cos(math.pi * step / 15)) / 2
        assert rate == pytest.approx(0.04 * warm_up * decay)


def test_the_ranks_average_once_a_step(tmp_path):
    """In two steps of 3 batches each. The proof line cannot tell: the losses are the same."""
    module, sent = load_lesson("13"), []
    images = MNIST(ROOT / "data", train=True)
    batches = [(images.data[i : i + 8], images.targets[i : i + 8]) for i in range(0, 48, 8)]

    def hook(_, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(module.Net())
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = LinearLR(optimizer, start_factor=1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        options = {"precision": "fp32", "accumulate": 3, "clip": 1.0, "check_every": 100}
        args = type("Args", (), options)
        module.train_one_epoch(
            model, batches, optimizer, scheduler, scaler, torch.device("cpu"), args
        )
    finally:
        dist.destroy_process_group()
    assert len(sent) == 2


def test_check_ranks_names_the_rank_that_has_another_bit_in_a_weight(tmp_path):
    samples = "        samples += len(labels)\n"
    bit = "model.module.fc2.bias.data.nextafter_(torch.tensor(9.0))"
    planted = f"{samples}        if (number, dist.get_rank()) == (4, 2):\n            {bit}\n"
    file = write_mutant(tmp_path, "13", (samples, planted))
    few = ("--max-steps", 8, "--check-every", 2, "--data-dir", ROOT / "data")
    status, output = run_ranks(3, file, *few, cwd=tmp_path)
    assert status == 1
    says = r"^After batch 4: another \S*fc2.bias on ranks \[2\]\.$"
    assert re.search(says, output, re.M), output
    assert "Traceback" not in output


CLIP = ("--clip", 0.3)
MUTANTS = [
    (
        (),
        "range(rank, len(test_set), world_size)",
        "DistributedSampler(test_set, shuffle=False)",
        ", 10,002 of 10,000 tested",
    ),
    ((), "(loss / args.accumulate)", "(loss)", "^=> fp32: losses within .e-0[1-4] "),
    (
        CLIP,
        "            nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n",
        "",
        "^=> fp32: losses within .e-0[1-4] ",
    ),
    (
        (*CLIP, "--precision", "fp16"),
        "            scaler.unscale_(optimizer)  # clip",
        "            # clip",
        "^=> fp16: losses within .e-0[1-2] ",
    ),
    (
        (),
        '        "model": model.state_dict(),',
        '        "model": Net().state_dict(),',
        "tested DIFFERENTLY than by one process: WRONG$",
    ),
]


@pytest.mark.parametrize(
    ("options", "line", "wrong", "says"),
    [MUTANTS[0], *(pytest.param(*x, marks=FULL) for x in MUTANTS[1:])],
)
def test_lesson_13_says_that_it_is_wrong(options, line, wrong, says, tmp_path):
    few = ("--epochs", 1, "--max-steps", 20, "--batch-size", 8, "--clip", 100)
    output = run_mutant("13", [(line, wrong)], 3, *few, *options, cwd=tmp_path)
    assert_disproved(output, says)
