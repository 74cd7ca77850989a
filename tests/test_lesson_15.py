"""Lesson 15: with Accelerate and without, the same training."""

import re
import subprocess
import sys

import pytest
from helpers import LAUNCHER, LESSONS, ROOT, losses, proves, refusal
from mutants import assert_disproved, run_mutant
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


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_it_finds_the_line_with_its_defaults(ranks, tmp_path):
    status, output = run_ranks(ranks, LESSON, cwd=tmp_path)
    assert status == 0, output
    assert output.count(f"ranks: {ranks}, device: ") == 1
    assert proves(output)
    assert "=> y = 0.70 x + 0.30 (limit 0.02 from 0.7 and 0.3), losses within " in output
    curve = losses(tmp_path / "runs" / LESSON.stem)
    # 100 steps on any number of ranks, of 500 points or a few less.
    assert [points for points, _ in curve] == [500 // ranks * ranks * n for n in range(1, 101)]
    assert curve[-1][1] < 1e-3 < curve[0][1]


def test_after_a_few_steps_it_has_not_found_the_line(tmp_path):
    few = ("--epochs", 3, "--batch-size", 50)
    status, output = run_ranks(3, LESSON, *few, cwd=tmp_path)
    assert status == 1, output
    assert not proves(output)
    assert "ranks: 3, device: " in output
    assert gap(output) < 1e-5


def test_accelerate_launch_starts_it_too(tmp_path):
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--cpu")
    status, output, errors = run(*launch, LESSON, cwd=tmp_path)
    assert status == 0, errors
    assert "ranks: 1, device: cpu" in output
    assert proves(output)


def test_on_two_nodes_of_slurm(slurm, tmp_path):
    done = slurm.run("salloc", "--nodes", 2, LAUNCHER, "15", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2, device: cpu" in done.stdout
    assert proves(done.stdout)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("accelerator.prepare(model, optimizer, loader)", "model, optimizer, loader"),
        # Only the line is wrong: with Accelerate and without, the losses are the same.
        ("TensorDataset(x, 0.7 * x + 0.3)", "TensorDataset(x, 0.7 * x + 0.4)"),
    ],
)
def test_another_training_or_another_line_is_wrong(line, wrong, tmp_path):
    output = run_mutant("15", [(line, wrong)], 2, cwd=tmp_path)
    assert_disproved(output, "losses within .* of those without Accelerate")
    assert gap(output) > 1e-3 or "=> y = 0.70 x + 0.40 (limit" in output


def test_a_bad_argument_gets_a_sentence():
    status, output = refusal("15", "--batch-size", 1001)
    assert status == 2
    assert "batch-size must be at most 1000" in output.splitlines()[-1]
    status, output = refusal("15", "--epochs", 0)
    assert status == 2
    assert "argument --epochs: must be " in output.splitlines()[-1]
