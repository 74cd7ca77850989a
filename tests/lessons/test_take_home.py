"""Lesson 13: one training, however it is divided, interrupted and resumed."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from safetensors.torch import load_file
from support.forked_ranks import run_ranks
from support.mutants import assert_disproved, write_mutant
from support.run import (
    LESSONS,
    ROOT,
    cached_across_workers,
    full,
    losses,
    output_of,
    proof_of,
    proves,
    rank_of,
    run,
    seeded_rng,
    write_pictures,
)

LESSON = ROOT / LESSONS["13"]["file"]
# 2,000 random images for training, 500 of them for the test.
FEW = (2, "--max-steps", 6, "--global-batch-size", 50, "--log-every", 2)
FEW += ("--workers", 1, "--clip", 0.1, "--data", "random")
RUN = Path("runs", LESSON.stem)


def train(ranks, *arguments, cwd, env=None):
    """Train on so many ranks; return what they print, which must end well."""
    output = output_of(run_ranks(ranks, LESSON, *FEW, *arguments, cwd=cwd, env=env))
    assert proves(output)
    return output


def refused(*arguments, cwd, ranks=2):
    """Return the one line with which a training ends that cannot be done."""
    output = output_of(run_ranks(ranks, LESSON, *FEW, *arguments, cwd=cwd), 1)
    assert "Traceback" not in output
    return output.splitlines()[-1]


def compared(folder, other, steps=12):
    """Return by how much the losses of two trainings differ at most. They must have all steps."""
    own, theirs = (dict(losses(path, "loss")) for path in (folder, other))
    assert list(own) == list(theirs) == list(range(1, steps + 1))
    return max(abs(own[step] - theirs[step]) for step in own)


def weights(folder, name="model"):
    """Return all numbers of the saved model in one tensor."""
    state = load_file(folder / f"{name}.safetensors")
    return torch.cat([tensor.flatten() for tensor in state.values()])


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """The folder of a training on 2 ranks that nobody interrupts."""

    def run():
        path = tmp_path_factory.mktemp("uninterrupted")
        assert "=> 500 of 500 tested, " in train(2, cwd=path)
        assert (path / RUN / "lock").stat().st_mode & 0o77 == 0  # others could stop the next run
        return str(path / RUN)

    return Path(cached_across_workers(tmp_path_factory, "lesson_13_whole", run))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, "--batch-size 8"),  # 50 samples in 3 x 3 batches of 5 and 6
        (2, "--shard"),
        full(1, "--batch-size 50 --workers 0"),
        full(4, "--batch-size 5"),
        full(3, "--shard --batch-size 7"),
        full(2, "--shard --batch-size 5"),  # each micro-batch is reduced
    ],
)
def test_the_losses_are_the_same_however_the_batch_is_divided(
    ranks, options, uninterrupted_run, tmp_path
):
    if "--shard" in options and torch.__version__ < "2.8":
        pytest.skip("--shard needs torch 2.8 or newer")  # it says so
    train(ranks, *options.split(), cwd=tmp_path)
    assert compared(tmp_path / RUN, uninterrupted_run) < 1e-5


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("(losses * weights).sum()", "losses.mean()"),
        full("parameters(), self.args.clip", "parameters(), 1e9"),
    ],
)
def test_compare_losses_finds_what_is_computed_in_another_way(
    line, wrong, uninterrupted_run, tmp_path
):
    file = write_mutant(tmp_path, "13", (line, wrong))
    output_of(run_ranks(3, file, *FEW, "--batch-size", 8, cwd=tmp_path))
    command = [sys.executable, ROOT / "scripts" / "compare_losses.py", RUN, uninterrupted_run]
    status, output = run(command, 60, tmp_path, None)
    assert_disproved(status, f"\n{output}", "^=> losses of 10 steps within ")
    command[2] = uninterrupted_run
    assert proves(output_of(run(command, 60, tmp_path, None)))
    status, output = run([*command[:3], "nothing"], 60, tmp_path, None)
    assert (status, output) == (1, "there is no nothing\n")


@pytest.mark.parametrize(
    ("name", "whose"),
    [("TERM", "job"), *(full(x, "rank") for x in ("KILL", "USR1"))],
)
def test_interrupted_it_ends_with_the_same_bits(name, whose, uninterrupted_run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += [LESSON, *FEW, "--log-every", 1]
    begun = f"step {seeded_rng().randrange(1, 4)} of 12" if name == "KILL" else "test of 500"
    with processes.Job(command, 100, cwd=tmp_path, stderr=subprocess.STDOUT) as job:
        next(line for line in job.lines() if begun in line)
        pid = job.process.pid if whose == "job" else rank_of(job, 1)
        os.kill(pid, getattr(signal, f"SIG{name}"))
        job.wait()
    # It saves first: the test after an epoch waits for the next start.
    stopped = re.search("^saved: .*/step-1\nStopped as told", job.output, re.M)
    assert bool(stopped) == (name != "KILL"), job.output
    assert job.status == (0 if name == "USR1" else 1), job.output  # torchrun's own is 1 after TERM
    output = train(2, cwd=tmp_path)
    assert name == "KILL" or "resumed: " in output
    assert compared(tmp_path / RUN, uninterrupted_run) == 0
    for file in ("model", "best"):
        assert torch.equal(weights(tmp_path / RUN, file), weights(uninterrupted_run, file))


def test_told_to_stop_it_says_so_with_its_exit_status(tmp_path):
    command = [sys.executable, LESSON, *FEW]
    with processes.Job(command, 100, cwd=tmp_path, stderr=subprocess.STDOUT) as job:
        next(line for line in job.lines() if "ranks: 1" in line)  # before there is data
        os.kill(job.process.pid, signal.SIGUSR1)
        job.wait()
    assert job.status == os.EX_TEMPFAIL, job.output
    said = "saved: runs/13_train/step-1\nStopped as told. The same command resumes from here.\n"
    assert job.output.endswith(said)


def test_after_the_end_a_broken_checkpoint_and_with_other_ranks(uninterrupted_run, tmp_path):
    first = train(2, cwd=tmp_path)
    folder = tmp_path / RUN
    shutil.copytree(folder / "step-12", folder / "step-13.tmp")  # what a kill leaves
    again = train(2, cwd=tmp_path)
    assert "this training has ended" in again
    assert proof_of(again) == proof_of(first)
    damaged = seeded_rng().choice(sorted((folder / "step-12").iterdir()))
    data = bytearray(damaged.read_bytes())
    data[seeded_rng().randrange(len(data))] ^= 1
    damaged.write_bytes(data)
    for empty in ("step-98", "step-99"):
        (folder / empty).mkdir()
    output = train(3, "--save-minutes", 0, cwd=tmp_path)
    assert "Traceback" not in output
    assert re.search(r"step-12 cannot be read: damaged ", output)
    assert "resumed: runs/13_train/step-6\n" in output
    saved = re.findall("saved: .*/(.*)", output)
    assert (saved[0], saved[-1]) == ("step-7", "step-12")
    assert compared(folder, uninterrupted_run) < 1e-5
    kept = {*saved[-2:], "step-98", "step-99"}  # what was empty is not counted
    assert {path.name for path in folder.glob("step-*")} == kept
    output = train(2, "--lr", 0.1, cwd=tmp_path)
    assert "\nlr was 0.05, now it's 0.1\n" in output
    seed = refused("--seed", 1, cwd=tmp_path)
    assert seed.startswith("seed was 0 where this training began, now 1: ")


@pytest.mark.full
def test_three_ranks_resume_with_the_same_bits(tmp_path):
    """Sums of two numbers round in one way only; DDP's first message is packed in another way."""
    train(3, cwd=tmp_path)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / RUN, whole)
    shutil.rmtree(tmp_path / RUN / "step-12")
    assert "resumed: runs/13_train/step-6\n" in train(3, "--log-every", 5, cwd=tmp_path)
    assert compared(tmp_path / RUN, whole) == 0
    assert torch.equal(weights(tmp_path / RUN), weights(whole))


def test_a_changed_model_is_refused_in_one_line(tmp_path):
    """It may have the same shapes: another activation, or a part that does not train."""
    train(1, cwd=tmp_path)
    frozen = "    model[5].bias.requires_grad_(False)\n"
    for line, instead, differs in (
        ("nn.Linear(32 * 4 * 4, 64), nn.ReLU()", "nn.Linear(512, 64), nn.GELU()", "layer 4.1"),
        ("        nn.Flatten(),\n", "        nn.Flatten(),\n        nn.Identity(),\n", "layer 4"),
        ("    return model, [model[0]", frozen + "    return model, [model[0]", "parameter 5.bias"),
        ("torch.optim.SGD(groups, args.lr, momentum=0.9", "torch.optim.Adam(groups", "optimizer"),
    ):
        folder = tmp_path / differs
        folder.mkdir()
        file = write_mutant(folder, "13", (line, instead))
        output = output_of(run_ranks(1, file, *FEW, "--checkpoint-dir", RUN, cwd=tmp_path), 1)
        assert "Traceback" not in output
        says = rf"(model: )?{differs} was .* where this training began, now .*: keep it, or "
        assert re.match(says, output.splitlines()[-1]), output


@pytest.fixture
def pictures(tmp_path):
    """A folder of pictures in three colours."""
    colours = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}
    write_pictures(tmp_path / "pictures", {"train": 20, "val": 5}, colours)
    return tmp_path / "pictures"


def test_a_folder_of_pictures_augmented_alike_on_any_ranks(pictures, tmp_path):
    few = (4, "--data", pictures, "--global-batch-size", 20, "--log-every", 3)
    output_of(run_ranks(1, LESSON, *few, "--checkpoint-dir", "one", cwd=tmp_path))
    output = output_of(run_ranks(3, LESSON, *few, cwd=tmp_path))
    assert compared(tmp_path / RUN, tmp_path / "one") < 1e-5
    assert ", accuracy 1\n" in output


def test_what_cannot_be_trained_says_so_in_one_line(pictures, tmp_path):
    (pictures / "train" / "red" / "7.png").write_bytes(b"broken")
    few = ("--data", pictures, "--global-batch-size", 60)
    said = refused(*few, cwd=tmp_path, ranks=1)  # of two ranks, the other might also say something
    assert re.search(r"red/7.png cannot be read: .*Error\(.cannot identify", said)
    assert "red cannot be" not in refused("--data", "nothing", cwd=tmp_path)
    (pictures / "val" / "red").rename(pictures / "val" / "grey")
    assert "train and val of " in refused(*few, cwd=tmp_path)
    too_few = refused("--global-batch-size", 2001, cwd=tmp_path)
    assert too_few.startswith("2000 samples to train with, 500 to test: less than a global batch")
    said = refused("--lr", 1e9, "--clip", 1e9, cwd=tmp_path)
    assert re.match(r"a loss or gradient was no number in steps \d+ and on$", said)


def test_two_jobs_do_not_mix(tmp_path):
    """The second one is refused while the first one trains."""
    import fcntl

    (tmp_path / RUN).mkdir(parents=True)
    with (tmp_path / RUN / "lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert refused(cwd=tmp_path) == "another job is training in runs/13_train"
