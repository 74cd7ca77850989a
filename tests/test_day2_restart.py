"""Lesson 12: stopped and started again, it ends where it would have ended."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import LAUNCHER, LESSONS, ROOT, chooser, proof_of
from mutants import assert_disproved, write_mutant
from ranks import run_ranks

FULL = pytest.mark.full
LESSON = ROOT / LESSONS["12"]["file"]
SNAPSHOT = Path("runs", LESSON.stem, "snapshot.pt")
# 3,198 images: 50 steps in an epoch of 2 ranks, and each of 3 ranks has as many images.
FEW = ("--images", 3198, "--batch-size", 32, "--save-every", 10)
SHORT = ("--images", 1280, "--save-every", 4)


def start(*arguments, cwd):
    """Start the launcher; return the Popen object."""
    command = [LAUNCHER, "--local", *map(str, arguments)]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, text=True, **both)


def ranks_in(folder):
    """Return the process ids of the ranks at work in a folder, in the order of the ranks."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
            if str(LESSON) in command[:3] and (process / "cwd").readlink() == folder:
                rank = re.search(r"\0RANK=(\d+)\0", (process / "environ").read_text())
                found[int(rank[1])] = int(process.name)
        except OSError:
            continue  # it ended in this moment
    return [found[rank] for rank in sorted(found)]


def left_in(folder):
    """Return the names of the files that the lesson has left."""
    return {x.name for x in (folder / SNAPSHOT).parent.iterdir()}


@pytest.mark.parametrize(
    ("ranks", "crash", "goes_on"),
    [
        (1, 8, "epoch 0 after 256 images"),
        (2, 14, "epoch 0 after 1,280 images"),
        pytest.param(3, 11, "epoch 0 after 1,278 images", marks=FULL),
        pytest.param(3, 14, "epoch 1 after 768 images", marks=FULL),
    ],
)
def test_a_job_that_failed_ends_where_it_would_have_ended(ranks, crash, goes_on, tmp_path):
    command = (ranks, LESSON, *SHORT, "--epochs", 2, "--crash-at-step", crash)
    status, output = run_ranks(*command, cwd=tmp_path)
    assert status == 1
    assert f"RuntimeError: rank 0 fails after step {crash}, as told" in output
    status, output = run_ranks(*command, cwd=tmp_path)
    assert status == 0, output
    assert f"start 2: resumes in {goes_on}\n" in output
    assert proof_of(output).startswith("=> starts: 2, images once an epoch: 1,2")
    assert proof_of(output).endswith("parameters as without a stop: ok")
    assert left_in(tmp_path) == {"model.pt"}


def test_torchrun_starts_the_ranks_again_when_one_is_killed(tmp_path):
    """kill -9 at any step: the job goes on from its last snapshot."""
    job = start("1x2", "--max-restarts", 1, LESSON, *FEW, cwd=tmp_path)
    choose = chooser()
    at, killed, lines = choose.choice((10, 20, 30)), False, []
    for line in job.stdout:
        lines.append(line)
        if not killed and line.startswith(f"step {at}: snapshot"):
            os.kill(choose.choice(ranks_in(tmp_path)), signal.SIGKILL)
            killed = True
    output = "".join(lines)
    assert job.wait() == 0, output
    assert proof_of(output).startswith("=> starts: 2, images once an epoch: 3,198 of 3,198 (limit")
    assert proof_of(output).endswith("parameters as without a stop: ok")


def stop_by(number, ranks, folder):
    """Start the lesson, and give its last rank a signal after the first snapshot."""
    job = start(ranks, LESSON, *FEW, "--epochs", 3, cwd=folder)
    lines = []
    while not lines or not lines[-1].startswith("step "):
        lines.append(job.stdout.readline())
        assert lines[-1], "".join(lines)
    os.kill(ranks_in(folder)[-1], number)
    output = "".join(lines) + job.communicate(timeout=100)[0]
    assert job.returncode == 0, output
    assert output.count("\nStopped as told. The same command resumes from here.\n") == 1


def test_stopped_by_signals_it_goes_on_with_other_numbers_of_ranks(tmp_path):
    for ranks, number in ((2, signal.SIGTERM), (1, signal.SIGUSR1)):
        stop_by(number, ranks, tmp_path)
    status, output = run_ranks(3, LESSON, *FEW, "--epochs", 3, cwd=tmp_path)
    assert status == 0, output
    assert re.search(r"^start 3: resumes in epoch \d after [\d,]+ images$", output, re.M)
    # Another number of ranks makes another global batch: other parameters, but the same images.
    assert re.fullmatch(
        r"=> starts: 3, images once an epoch: 3,19\d of 3,198 \(limit 3,1\d\d\), "
        r"parameters not compared \(2, 1, 3 ranks\): ok",
        proof_of(output),
    )
    assert left_in(tmp_path) == {"model.pt"}


def test_a_snapshot_of_another_job_is_not_used(tmp_path):
    status, output = run_ranks(1, LESSON, *SHORT, "--crash-at-step", 10, cwd=tmp_path)
    assert status == 1, output
    status, output = run_ranks(1, LESSON, *SHORT, "--lr", 1, cwd=tmp_path)
    assert status == 1
    assert "snapshot.pt is from a job with different arguments. Use those, or rename " in output
    assert "Traceback" not in output


MUTANTS = [
    ('        self.optimizer.load_state_dict(state["optimizer"])\n', "", "1,280"),
    ('        self.model.load_state_dict(state["model"])\n', "", "1,280"),
    ("order[seen + self.rank ::", "order[self.rank ::", "256"),
]


@pytest.mark.parametrize(
    ("line", "wrong", "once"), [MUTANTS[0], *(pytest.param(*x, marks=FULL) for x in MUTANTS[1:])]
)
def test_lesson_12_says_what_it_has_forgotten(line, wrong, once, tmp_path):
    mutant = write_mutant(tmp_path, "12", (line, wrong))
    few = (*SHORT, "--crash-at-step", 6)
    status, output = run_ranks(2, mutant, *few, cwd=tmp_path)
    assert status == 1
    assert "RuntimeError: rank 0 fails after step 8" in output
    says = rf"images once an epoch: {once} of 1,280 \(limit 1,279\), parameters DIFFERENT: WRONG$"
    # torchrun starts a job again that ends with 1. That must not make it right.
    for starts in (2, 3):
        status, output = run_ranks(2, mutant, *few, cwd=tmp_path)
        assert status == 1, output
        assert_disproved(output, f"^=> starts: {starts}, {says}")
