"""Lesson 15: with Accelerate and without, the same training."""

import re
import subprocess
import sys

import pytest
from helpers import LAUNCHER, LESSONS, ROOT, losses, proves, refusal
from ranks import run_ranks

LESSON = ROOT / LESSONS["15"]["file"]


def run(*command, cwd):
    """Run a command; return (exit status, stdout, stderr)."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout, done.stderr


def gap(output):
    """Return how far the losses with Accelerate are from those without."""
    return float(re.search(r"losses within (\S+)", output)[1])


def test_it_finds_the_line(tmp_path):
    status, output = run_ranks(2, LESSON, "--epochs", 30, cwd=tmp_path)
    assert status == 0, output
    assert output.count("ranks: 2, device: ") == 1
    assert proves("15", output)
    curve = losses(tmp_path / "runs" / LESSON.stem)
    assert [step for step, _ in curve] == [4 * n for n in range(1, 31)]
    assert curve[-1][1] < 1e-3 < curve[0][1]


def test_three_ranks_take_the_same_steps(tmp_path):
    few = ("--epochs", 3, "--batch-size", 50)
    status, output = run_ranks(3, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert "ranks: 3, device: " in output
    assert gap(output) < 1e-5


def test_accelerate_launch_starts_it_too(tmp_path):
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--cpu")
    status, output, errors = run(*launch, LESSON, "--epochs", 1, cwd=tmp_path)
    assert status == 0, errors
    assert "ranks: 1, device: cpu" in output
    assert gap(output) < 1e-5


def test_on_two_nodes_of_slurm(slurm, tmp_path):
    done = slurm.run("salloc", "--nodes", 2, LAUNCHER, "15", "--epochs", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2, device: cpu" in done.stdout
    assert gap(done.stdout) < 1e-5


@pytest.mark.mutation
def test_without_prepare_it_is_another_training(tmp_path):
    text, line = LESSON.read_text(), ".prepare(model, optimizer, loader)"
    assert text.count(line) == 1
    mutant = tmp_path / "mutant.py"
    mutant.write_text(text.replace(f"accelerator{line}", "model, optimizer, loader"))
    status, output = run_ranks(2, mutant, "--epochs", 3, cwd=tmp_path)
    assert status == 0, output
    assert gap(output) > 1e-3
    assert not proves("15", output)


def test_a_bad_argument_gets_a_sentence():
    status, output = refusal("15", "--batch-size", 1001)
    assert status == 2
    assert "batch-size must be at most 1000" in output.splitlines()[-1]
