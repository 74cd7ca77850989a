"""Lesson 13: one training, however it is divided, interrupted and resumed."""

import json
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
from PIL import Image
from support.forked_ranks import run_ranks
from support.run import (
    LESSONS,
    ROOT,
    cached_across_workers,
    full,
    launch,
    load_lesson,
    output_of,
    proof_of,
    proves,
    rank_of,
    seeded_rng,
)

FULL = pytest.mark.full
LESSON = ROOT / LESSONS["13"]["file"]
# 2,000 random images for training, 500 of them for the test.
FEW = (2, 1, "--max-steps", 6, "--global-batch-size", 50, "--log-every", 2)
FEW += ("--workers", 1, "--clip", 0.3, "--data", "random")
RUN = Path("runs", LESSON.stem)


def train(ranks, *arguments, cwd, env=None):
    """Train on so many ranks; return what they print, which must end well."""
    return output_of(run_ranks(ranks, LESSON, *FEW, *arguments, cwd=cwd, env=env))


def refused(*arguments, cwd, ranks=2):
    """Return the one line with which a training ends that cannot be done."""
    status, output = run_ranks(ranks, LESSON, *FEW, *arguments, cwd=cwd)
    assert status == 1, output
    assert "Traceback" not in output
    return output.splitlines()[-1]


def compared(output):
    """Return how many losses were compared, and the largest difference."""
    found = re.match(r"=> losses of \d+ steps within .*, of (\d+) within (\S+): ", proof_of(output))
    return int(found[1]), float(found[2])


def weights(folder):
    """Return all numbers of the saved model in one tensor."""
    state = torch.load(folder / "model.pt", weights_only=True)
    return torch.cat([tensor.flatten() for tensor in state.values()])


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """The folder of a training on 2 ranks that nobody interrupts."""

    def run():
        path = tmp_path_factory.mktemp("uninterrupted")
        assert "=> 500 of 500 tested, " in train(2, cwd=path)
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
        full(2, "--compile"),
    ],
)
def test_the_losses_are_the_same_however_the_batch_is_divided(
    ranks, options, uninterrupted_run, tmp_path
):
    if "--shard" in options and torch.__version__ < "2.8":
        pytest.skip("--shard needs torch 2.8 or newer")  # it says so
    output = train(ranks, *options.split(), "--compare", uninterrupted_run, cwd=tmp_path)
    steps, gap = compared(output)
    assert proves(output)
    assert steps == 12
    assert gap < 1e-5


def stopped_by(number, whose, folder):
    """Train under torchrun and give the job, or one of its ranks, a signal. Return the job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += [LESSON, *FEW, "--log-every", 1]
    step = seeded_rng().randrange(1, 4)  # what comes after it takes a second
    with processes.Job(command, 100, cwd=folder, stderr=subprocess.STDOUT) as job:
        next(line for line in job.lines() if f"step {step} of 12" in line)
        os.kill(job.process.pid if whose == "job" else rank_of(job, 1), number)
        job.wait()
    return job


@pytest.mark.parametrize(
    ("name", "whose"),
    [("TERM", "job"), *(full(x, "rank") for x in ("KILL", "USR1"))],
)
def test_interrupted_it_ends_with_the_same_bits(name, whose, uninterrupted_run, tmp_path):
    number = getattr(signal, f"SIG{name}")
    job = stopped_by(number, whose, tmp_path)
    # It saves first: the test after an epoch waits for the next start.
    stopped = re.search("^saved: .*\nStopped as told", job.output, re.M)
    assert bool(stopped) == (name != "KILL"), job.output
    assert job.status == (0 if name == "USR1" else 1), job.output  # torchrun's own is 1 after TERM
    output = train(2, "--compare", uninterrupted_run, cwd=tmp_path)
    assert name == "KILL" or "resumed: " in output
    assert compared(output) == (12, 0)
    assert torch.equal(weights(tmp_path / RUN), weights(uninterrupted_run))


def test_after_the_end_a_broken_checkpoint_and_with_other_ranks(uninterrupted_run, tmp_path):
    first = train(2, cwd=tmp_path)
    again = train(2, cwd=tmp_path)
    assert "this training has ended" in again
    assert proof_of(again) == proof_of(first)
    folder = tmp_path / RUN
    assert (folder / "latest").read_text() == "step-12"
    steps = [x["step"] for x in map(json.loads, (folder / "metrics.jsonl").open()) if "loss" in x]
    assert steps == list(range(1, 13))
    os.truncate(folder / "step-12" / "__0_0.distcp", 1000)
    output = train(3, "--compare", uninterrupted_run, cwd=tmp_path)
    assert "step-12 cannot be read: " in output
    assert "resumed: runs/13_train/step-6\n" in output
    assert proves(output)
    assert {path.name for path in folder.glob("step-*")} == {"step-6", "step-12"}
    assert "lr was 0.05 where this training began: " in refused("--lr", 0.1, cwd=tmp_path)
    assert "no checkpoint fits" in refused("--model", "resnet18", cwd=tmp_path)


class Random(torch.utils.data.Dataset):
    """Data that is random each time it's read, as an augmented picture is."""

    def __getitem__(self, index):
        return torch.rand(3)


def test_what_is_random_depends_on_the_epoch_and_the_sample_only():
    lesson = load_lesson("13")
    first, again, later = (lesson.Seeded(Random(), 0, epoch) for epoch in (0, 0, 1))
    assert torch.equal(first[5], again[5])
    assert not torch.equal(first[5], first[6])
    assert not torch.equal(first[5], later[5])


def pictures(folder, broken=False):
    """Write a folder of small pictures in three colours, as ImageFolder reads it."""
    for part, count in (("train", 20), ("val", 5)):
        for number, name in enumerate(("red", "green", "blue")):
            path = folder / "pictures" / part / name
            path.mkdir(parents=True)
            colour = [0, 0, 0]
            colour[number] = 200
            for picture in range(count):
                Image.new("RGB", (70 + picture, 80), tuple(colour)).save(path / f"{picture}.png")
    if broken:
        (path.parents[1] / "train" / "red" / "7.png").write_bytes(b"broken")
    return folder / "pictures"


def test_a_folder_of_pictures_augmented_alike_on_any_ranks(tmp_path):
    few = (4, 2, "--data", pictures(tmp_path), "--global-batch-size", 20, "--log-every", 3)
    output_of(run_ranks(1, LESSON, *few, "--checkpoint-dir", "one", cwd=tmp_path))
    output = output_of(run_ranks(3, LESSON, *few, "--compare", "one", cwd=tmp_path))
    assert proves(output)
    assert "accuracy 100.00%" in output


def test_what_cannot_be_trained_says_so_in_one_line(tmp_path):
    folder = pictures(tmp_path, broken=True)
    few = ("--data", folder, "--global-batch-size", 60)
    said = refused(*few, cwd=tmp_path, ranks=1)  # of two ranks, the other might also say something
    assert re.search(r"red/7.png cannot be read: .*Error: cannot identify", said)
    Image.new("1", (14_000, 14_000)).save(folder / "train" / "red" / "7.png")
    assert re.search(r"red/7.png cannot be read: .*Bomb", refused(*few, cwd=tmp_path, ranks=1))
    assert "red cannot be" not in refused("--data", "nothing", cwd=tmp_path)
    for part in ("train", "val"):
        shutil.copytree(folder / part / "blue", folder / part / ".ipynb_checkpoints")
    assert "move .ipynb_checkpoints out of " in refused(*few, cwd=tmp_path)
    (folder / "val" / "red").rename(folder / "val" / "grey")
    assert "train and val of " in refused(*few, cwd=tmp_path)
    too_few = refused("--global-batch-size", 2001, cwd=tmp_path)
    assert too_few == "2000 samples are less than a global batch"
    assert "a loss was nan" in refused("--lr", 1e30, "--clip", 1e30, cwd=tmp_path)


def test_two_jobs_do_not_mix(tmp_path):
    """The second one is refused while the first one trains."""
    import fcntl

    (tmp_path / RUN).mkdir(parents=True)
    with (tmp_path / RUN / "lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert refused(cwd=tmp_path) == "another job is training in runs/13_train"


@FULL
def test_python_alone_and_the_launcher(uninterrupted_run, tmp_path):
    command = [sys.executable, LESSON, *FEW, "--compare", uninterrupted_run]
    done = subprocess.run([str(x) for x in command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert proves(done.stdout)
    for number, nodes in enumerate(("2x1", "1x2", "2x2")):
        few = (*FEW, "--compare", uninterrupted_run, "--checkpoint-dir", number)
        output = output_of(launch("--local", nodes, LESSON, *map(str, few), cwd=tmp_path))
        assert proves(output)
