"""Lesson 12: stopped and started again, it ends where it would have ended."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import (
    ALONE,
    LAUNCHER,
    LESSONS,
    ROOT,
    chooser,
    launch,
    losses,
    proof_of,
    proves,
    refusal,
)
from mutants import assert_disproved, write_mutant
from ranks import run_ranks

LESSON = ROOT / LESSONS["12"]["file"]
FEW = ("--images", 3198, "--batch-size", 32, "--save-every", 10)
SNAPSHOT = "runs/12_mnist_ddp_torchrun_elastic/snapshot.pt"


def start(*arguments, cwd):
    """Start the launcher; return the Popen object."""
    return subprocess.Popen(
        [LAUNCHER, *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ranks_in(folder):
    """Return the ids of the ranks at work in a folder. torchrun gives each a session of its own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
            if str(LESSON) in command[:3] and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue  # it ended in this moment
    return found


def test_ranks_that_are_killed_change_nothing(tmp_path):
    """kill -9 at any step: the job goes on from its last snapshot."""
    job = start("--local", "1x2", "--max-restarts", 1, LESSON, *FEW, "--epochs", 2, cwd=tmp_path)
    choose, lines, kills = chooser(), [], 0
    at = choose.choice((10, 20, 30))
    for line in job.stdout:
        lines.append(line)
        step = re.match(r"step (\d+): snapshot", line)
        if step and kills < 1 and int(step[1]) >= at:
            kills += 1
            os.kill(choose.choice(sorted(ranks_in(tmp_path))), 9)
    output = "".join(lines)
    assert job.wait() == 0, output
    once = "=> starts: 2, images once an epoch: 3,198 of 3,198 (limit 3,196), "
    assert proof_of(output) == once + "parameters as without a stop: ok"
    # One curve, without a gap or a double: 50 steps in each epoch.
    curve = losses(tmp_path / "runs" / LESSON.stem)
    assert [images for images, _ in curve] == [64 * n for n in range(1, 101)]
    assert curve[-1][1] < 0.9 * curve[0][1]


def test_stopped_by_a_signal_it_goes_on_with_another_number_of_ranks(tmp_path):
    job = start("--local", "3", LESSON, *FEW, "--epochs", 4, cwd=tmp_path)
    while "snapshot" not in job.stdout.readline():
        assert job.poll() is None
    number = chooser().choice((signal.SIGTERM, signal.SIGUSR1))
    os.kill(sorted(ranks_in(tmp_path))[1], number)
    output = job.communicate(timeout=100)[0]
    assert job.returncode == 0, output
    assert output.endswith("Stopped as told. The same command goes on from here.\n")
    # A job with other arguments does not take this snapshot, and leaves it alone.
    status, output = run_ranks(1, LESSON, *FEW, "--lr", 1, cwd=tmp_path)
    assert status == 1
    assert "snapshot.pt is of a job with other arguments. Repeat those, or delete" in output
    assert "Traceback" not in output
    told = "    job.scheduler.step()\n"
    rate = told + "    print('rate', job.optimizer.param_groups[0]['lr'], flush=True)\n"
    assert LESSON.read_text().count(told) == 1
    (tmp_path / LESSON.name).write_text(LESSON.read_text().replace(told, rate))
    few = (*FEW, "--epochs", 4, "--data-dir", ROOT / "data")
    status, output = run_ranks(2, tmp_path / LESSON.name, *few, cwd=tmp_path)
    assert status == 0, output
    assert len(re.findall(r"^rate 0\.02$", output, re.M)) == 2  # that of 2 ranks, from now on
    assert re.search(r"^start 2: goes on in epoch \d after [\d,]+ images$", output, re.M)
    # Another number of ranks makes another global batch: other parameters, but the same images.
    once = "=> starts: 2, images once an epoch: 3,198 of 3,198 (limit 3,190), "
    assert proof_of(output) == once + "parameters not compared (3, 2 ranks): ok"
    left = {x.name for x in (tmp_path / SNAPSHOT).parent.iterdir() if "tfevents" not in x.name}
    assert left == {"model.pt"}


def test_a_failing_rank_on_two_nodes_of_slurm(slurm, tmp_path):
    options = ("--max-restarts", 1, LESSON, *FEW, "--crash-at-step", 25, "--crash-rank", 1)
    done = slurm.run("salloc", "--nodes", 2, LAUNCHER, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "start 2: goes on in epoch 0 after 1,280 images" in done.stdout
    assert proves(done.stdout)
    errors = "".join(x.read_text() for x in tmp_path.glob("runs/torchrun/*/attempt_0/*/stderr.log"))
    assert "RuntimeError: rank 1 fails after step 25, as told" in errors


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("line", "wrong", "once"),
    [
        ('        self.model.load_state_dict(state["model"])\n', "", "1,280"),
        ('        self.optimizer.load_state_dict(state["optimizer"])\n', "", "1,280"),
        ('        self.scheduler.load_state_dict(state["scheduler"])\n', "", "1,280"),
        ("order[job.seen + rank ::", "order[rank ::", "0"),
    ],
)
def test_without_its_key_line_lesson_12_ends_elsewhere(line, wrong, once, tmp_path):
    mutant = write_mutant(tmp_path, "12", (line, wrong))
    few = ("--images", 1280, "--epochs", 1, "--save-every", 4, "--crash-at-step", 6)
    few = (*few, "--data-dir", ROOT / "data")
    status, output = run_ranks(2, mutant, *few, cwd=tmp_path)
    assert status == 1
    assert "RuntimeError: rank 0 fails after step 6" in output
    says = rf"images once an epoch: {once} of 1,280 \(limit 1,279\), parameters DIFFERENT: WRONG$"
    # torchrun starts a job again that ends with 1. That must not make it right.
    for starts in (2, 3):
        status, output = run_ranks(2, mutant, *few, cwd=tmp_path)
        assert status == 1, output
        assert "snapshot.pt stays. Delete it to begin again." in output
        assert_disproved(output, f"^=> starts: {starts}, {says}")


@pytest.mark.mutation
def test_torchrun_starts_a_job_that_is_wrong_again_and_ends_with_its_status(tmp_path):
    line = '        self.optimizer.load_state_dict(state["optimizer"])\n'
    mutant = write_mutant(tmp_path, "12", (line, ""))
    few = ("--images", 1280, "--save-every", 4, "--crash-at-step", 6, "--data-dir", ROOT / "data")
    options = ("--local", "1x1", "--max-restarts", 2)
    status, output = launch(*options, mutant, *few, cwd=tmp_path)
    assert status == 1, output
    starts = re.findall(r"^=> starts: (\d), .* parameters DIFFERENT: WRONG$", output, re.M)
    assert starts == ["2", "3"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--save-every", 0), "argument --save-every: must be a whole number greater than 0"),
        (("--images", "x"), "argument --images: must be a whole number greater than 0, not x"),
        (("--images", 3), "images must be at least 4: one for each of the ranks"),
    ],
)
def test_bad_arguments_get_a_sentence(options, sentence):
    status, output = refusal("12", *options, env=ALONE | {"WORLD_SIZE": "4"})
    assert status == 2
    assert sentence in output.splitlines()[-1]
