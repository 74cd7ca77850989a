"""Lesson 13: one training, however it is divided, interrupted and resumed."""

import fcntl
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
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

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
    ("name", "ranks"),
    [("USR1", 1), ("TERM", 2), *(full(x, 2) for x in ("KILL", "USR1"))],
)
def test_interrupted_it_ends_with_the_same_bits(name, ranks, uninterrupted_run, tmp_path):
    """Rank 1 gets the signal, from TERM on torchrun, and python with one rank itself."""
    command = [sys.executable, LESSON, *FEW, "--log-every", 1]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    begun = f"step {seeded_rng().randrange(1, 4)} of 12" if name == "KILL" else "test of 500"
    with processes.Job(command, 100, cwd=tmp_path, stderr=subprocess.STDOUT) as job:
        next(line for line in job.lines() if begun in line)
        pid = job.process.pid if ranks == 1 or name == "TERM" else rank_of(job, 1)
        os.kill(pid, getattr(signal, f"SIG{name}"))
        job.wait()
    # It saves first: the test after an epoch waits for the next start.
    stopped = re.search(r"^saved: .*/step-0000000\d\nStopped as told", job.output, re.M)
    assert bool(stopped) == (name != "KILL"), job.output
    status = os.EX_TEMPFAIL if ranks == 1 else 0 if name == "USR1" else 1
    assert job.status == status, job.output  # torchrun's own is 1 after TERM
    if ranks == 2:
        output = train(2, cwd=tmp_path)
        assert name == "KILL" or "resumed: " in output
        assert compared(tmp_path / RUN, uninterrupted_run) == 0
        for file in ("model", "best"):
            assert torch.equal(weights(tmp_path / RUN, file), weights(uninterrupted_run, file))


def test_after_the_end_a_flipped_bit_and_on_other_ranks(tmp_path):
    """On three ranks: sums of two numbers round in one way only, however DDP packs them."""
    first = train(3, cwd=tmp_path)
    folder = tmp_path / RUN
    last = folder / "step-00000012"
    shutil.copytree(last, folder / "step-00000013.tmp")  # what a kill leaves
    assert proof_of(train(3, cwd=tmp_path)) == proof_of(first)
    whole = shutil.copytree(folder, tmp_path / "whole")
    damaged = seeded_rng().choice(sorted(last.iterdir()))
    data = bytearray(damaged.read_bytes())
    data[seeded_rng().randrange(len(data))] ^= 1
    damaged.write_bytes(data)
    (folder / "step-00000099").mkdir()
    output = train(3, "--save-every", 1, cwd=tmp_path)
    assert "Traceback" not in output
    assert re.search(rf"step-00000012 cannot be read: damaged .*{damaged.name}", output)
    assert "resumed: runs/13_train/step-00000006\n" in output
    assert compared(folder, whole) == 0
    assert torch.equal(weights(folder), weights(whole))
    saved = re.findall("saved: .*/(.*)", output)
    kept = {*saved[-2:], "step-00000099"}  # what was empty is not counted
    assert {path.name for path in folder.glob("step-*")} == kept
    shutil.rmtree(last)
    assert "resumed: runs/13_train/step-00000011\n" in train(2, "--lr", 0.051, cwd=tmp_path)
    assert 0 < compared(folder, whole) < 1e-3
    seed = refused("--seed", 1, cwd=tmp_path)
    assert seed.startswith("this is another training: runs/13_train/step-00000012 has 'seed: 0', ")


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="--shard needs torch 2.8 or newer")
def test_a_checkpoint_is_of_no_layout(uninterrupted_run, tmp_path):
    """Two ranks without --shard began it. The others take it from each other."""
    folder = shutil.copytree(uninterrupted_run, tmp_path / RUN)
    last = folder / "step-00000012"
    for ranks, *options in [(2, "--shard", "--save-every", 3), (3, "--shard"), (1,)]:
        shutil.rmtree(last)
        assert "resumed: " in train(ranks, "--save-every", 2, *options, cwd=tmp_path)
        assert compared(folder, uninterrupted_run) < 1e-5
        assert (weights(folder) - weights(uninterrupted_run)).abs().max() < 1e-5
    dcp_to_torch_save(last, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt")["model"]
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], x) for name, x in exported.items())


def test_a_changed_model_is_refused_in_one_line(tmp_path):
    """It may have the same shapes: another activation, or a part that does not train."""
    train(1, cwd=tmp_path)
    frozen = "    model[4].bias.requires_grad_(False)\n"
    for line, instead, differs in (
        ("nn.Linear(32 * 4 * 4, 64), nn.ReLU()", "nn.Linear(512, 64), nn.GELU()", r"\(1\): GELU"),
        ("nn.Flatten()", "nn.Flatten(), nn.Identity()", "Identity"),
        ("    return model, [first", frozen + "    return model, [first", "4.bias: .* False"),
        ("SGD(parameters, args.lr, momentum=0.9", "Adam(parameters", "Adam"),
    ):
        folder = tmp_path / differs[-5:]
        folder.mkdir()
        file = write_mutant(folder, "13", (line, instead))
        output = output_of(run_ranks(1, file, *FEW, "--checkpoint-dir", RUN, cwd=tmp_path), 1)
        assert "Traceback" not in output
        assert re.match(f"this is another training: .* has .*{differs}", output.splitlines()[-1])


def test_what_cannot_be_trained_says_so_in_one_line(tmp_path):
    assert "nothing" in refused("--data", "nothing", cwd=tmp_path)
    too_few = refused("--global-batch-size", 2001, cwd=tmp_path)
    assert too_few == "2000 samples are less than a global batch"
    said = refused("--lr", 1e9, "--clip", 1e9, cwd=tmp_path)
    assert re.match(r"a loss or gradient was no number in steps \d+ and on$", said)
    with (tmp_path / RUN / "lock").open("a") as lock:  # as while a job trains
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert refused(cwd=tmp_path).startswith("cannot lock runs/13_train: ")
