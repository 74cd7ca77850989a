"""Lesson 10 on imitated nodes, and on those of a real Slurm."""

import re

import pytest
from helpers import LAUNCHER, LESSONS, ROOT, launch, once, proves
from ranks import run_ranks

FEW = ("--images", 640)


def losses_of(output):
    """Return lesson 8's and 10's mean losses, in the order of the rows."""
    return [float(loss) for loss in re.findall(r"mean loss ([\d.]+), test", output, re.M)]


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory):
    """The losses of lesson 8 with four processes."""

    def run():
        return run_ranks(4, ROOT / LESSONS["8"]["file"], *FEW, cwd=tmp_path_factory.mktemp("one"))

    status, output = once(tmp_path_factory, "lesson_8", run)
    assert status == 0, output
    return losses_of(output)


def test_lesson_10_on_imitated_nodes_has_the_losses_of_one_node(on_one_node, tmp_path):
    status, output = launch("--local", "2x2", 10, *FEW, cwd=tmp_path)
    assert status == 0, output
    assert proves(output)
    assert losses_of(output) == pytest.approx(on_one_node, abs=2e-4)
    assert (tmp_path / "runs" / "10_mnist_ddp_pt_multinode" / "loss.png").exists()


def test_lesson_10_on_two_nodes_has_the_losses_of_one(slurm, on_one_node, tmp_path):
    done = slurm.run(
        "salloc", "--nodes", 2, "--ntasks-per-node", 2, LAUNCHER, "10", *FEW, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert proves(done.stdout)
    assert losses_of(done.stdout) == pytest.approx(on_one_node, abs=2e-4)


def test_torchrun_on_two_nodes(slurm, on_one_node, tmp_path):
    command = ("salloc", "--nodes", 2, "--ntasks-per-node", 2, LAUNCHER, "--torchrun")
    done = slurm.run(*command, "10", *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses_of(done.stdout) == pytest.approx(on_one_node, abs=2e-4)
