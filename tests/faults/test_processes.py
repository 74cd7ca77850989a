"""Ranks, launchers and nodes that die, stop, fail or run out of memory."""

import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
from catalogue import PATIENCE, Job, changed, lesson, local, on_slurm
from helpers import LAUNCHER, LESSONS, ROOT, wait_for

MEMORY = "Often memory ran out: fewer processes, or a smaller `--batch-size`."
FIRST = "Look above for what this rank says itself."
LOST = r"Slurm has lost node2, or cannot reach it\.|A node does not answer: see"


def long(lesson_id, folder):
    """Write a lesson that measures for minutes; return the file."""
    return changed(folder, lesson_id, "range(4):", "range(400):")


# Day 1: the lesson starts its own ranks.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_day_1_is_killed(rank, tmp_path):
    job = lesson("1", 2, cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    job.check(
        f"kill -9 of rank {rank}, Day 1",
        rf"process {rank} terminated with signal SIGKILL$",
        MEMORY,
        status=1,
    )


def test_a_rank_of_day_1_raises_while_another_waits(tmp_path):
    line = "    before = value.item()\n"
    raises = line + '    if rank == 1:\n        raise ValueError("ouch")\n'
    file = changed(tmp_path, "0", line, raises)
    job = lesson("0", 2, cwd=tmp_path, file=file)
    output = job.check(
        "an exception on rank 1, Day 1; rank 0 waits",
        "^ValueError: ouch$",
        "Above stands the rank, `-- Process 1 terminated`, and the line.",
        status=1,
    )
    assert "-- Process 1 terminated with the following error:" in output


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -TERM", "kill -KILL"])
def test_the_lesson_that_started_the_ranks_is_stopped(how, tmp_path):
    job = lesson("1", 2, cwd=tmp_path, file=long("1", tmp_path))
    job.until("4 kB:")
    if how == "Ctrl-C":  # the terminal sends it to every process in the foreground
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.process.send_signal(getattr(signal, "SIG" + how.removeprefix("kill -")))
    output = job.check(f"{how}, Day 1", None, "All ranks end with it.")
    assert "Traceback" not in output


# The launcher of Day 2, on imitated nodes.


@pytest.mark.parametrize("rank", [0])
def test_a_rank_on_an_imitated_node_is_killed(rank, tmp_path):
    job = local("2", "9", cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    job.check(
        f"kill -9 of rank {rank}, `--local`",
        rf"^The first to fail: rank {rank} on imitated node {rank} ended with signal KILL\.$",
        MEMORY,
    )


def test_a_rank_on_an_imitated_node_raises(tmp_path):
    line = "    value = torch.tensor(float(rank), device=device)\n"
    raises = line + '    if rank == 1:\n        raise ValueError("ouch")\n'
    job = local("2", changed(tmp_path, "9", line, raises), cwd=tmp_path)
    output = job.check(
        "an exception on rank 1, `--local`; rank 0 waits",
        r"^The first to fail: rank 1 on imitated node 1 ended with exit status 1\.$",
        FIRST,
    )
    assert "[rank1]: ValueError: ouch" in output


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -TERM"])
def test_the_launcher_is_stopped(how, tmp_path):
    job = local("2", long("9", tmp_path), cwd=tmp_path)
    job.until("4 kB:")
    if how == "Ctrl-C":
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.process.terminate()
    job.check(f"{how}, `--local`", None, "All ranks end with it.")


PYTHON = (sys.executable, "-u")
IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        ((*PYTHON, ROOT / LESSONS["1"]["file"], 2), "4 kB:"),
        ((LAUNCHER, "--local", 2, 9), "4 kB:"),
        ((ROOT / "scripts" / "doctor.sh", "--local", 1), "ok   "),
    ],
    ids=["a lesson of Day 1", "the launcher", "the doctor"],
)
def test_ctrl_c_leaves_alone_what_a_script_runs_in_the_background(command, begins, tmp_path):
    """A script starts a command before & so that it ignores Ctrl-C. It must not change that."""
    job = Job(*IN_BACKGROUND, *command, cwd=tmp_path)
    job.until(begins)
    os.killpg(job.process.pid, signal.SIGINT)
    ended = wait_for(lambda: job.process.poll() is not None, 100)
    output = job.end()
    assert (ended, job.process.returncode) == (True, 0), output
    assert "\n=> " in output


def test_ctrl_c_leaves_alone_a_file_written_in_the_background(tmp_path):
    create, file = ROOT / LESSONS["create_mnist_h5"]["file"], tmp_path / "mnist.h5"
    job = Job(*IN_BACKGROUND, *PYTHON, create, "--file", file, "--copies", 10, cwd=tmp_path)
    job.until_file(".mnist.h5.*")
    os.killpg(job.process.pid, signal.SIGINT)
    ended = wait_for(lambda: job.process.poll() is not None, 100)
    output = job.end()
    assert (ended, job.process.returncode) == (True, 0), output
    assert file.exists()


def test_a_stopped_rank_is_seen_by_the_timeout(tmp_path):
    job = local("2", "9", cwd=tmp_path, env=PATIENCE)
    job.until("1 MB:")
    job.hit(1, "STOP")
    output = job.check(
        "a rank hangs, `--local` (`DIST_TIMEOUT=6`)",
        r"^Still running: rank 1 on imitated node 1\.$",
        "The others have waited for this rank: see where it hangs, with "
        "[the guide](day1/GUIDE.md#when-it-hangs).",
    )
    assert "Timed out waiting 6000ms" in output


def test_a_rank_runs_out_of_memory(tmp_path):
    job = local("2", "9", cwd=tmp_path)
    job.until("rank 1 of 2")
    # No more than it has now, and a little.
    size = int(Path(f"/proc/{job.rank(1)}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(job.rank(1), resource.RLIMIT_AS, (size + 2**24, size + 2**24))
    output = job.check(
        "rank 1 gets no more memory, `--local`",
        r"^The first to fail: rank 1 on imitated node 1 ended with exit status 1\.$",
        FIRST + " Then fewer processes, or a smaller `--batch-size`.",
    )
    assert "can't allocate memory: you tried to allocate 64000000 bytes" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun_is_killed(rank, tmp_path):
    job = local("1x2", "--torchrun", "9", cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    job.check(
        f"kill -9 of rank {rank}, torchrun",
        rf"rank      : {rank} \(local_rank: {rank}\)(?s:.*)Signal 9 \(SIGKILL\) received",
        MEMORY,
    )


# A real Slurm.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_on_a_node_is_killed(rank, slurm, tmp_path):
    job = on_slurm(slurm, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    job.check(
        f"kill -9 of rank {rank}, Slurm",
        rf"^The first to fail: rank {rank} on node{rank + 1} ended with signal KILL\.$",
        MEMORY + " `--mem` at `salloc`.",
    )


@pytest.mark.parametrize("how", ["scancel", "Ctrl-C"])
def test_a_job_of_slurm_is_stopped(how, slurm, tmp_path):
    command = ("salloc", "--nodes", 2, "-J", how, LAUNCHER, long("9", tmp_path))
    job = on_slurm(slurm, *command, cwd=tmp_path)
    job.until("4 kB:")
    if how == "scancel":
        slurm.run("scancel", "--name", how, cwd=tmp_path)
    else:
        os.killpg(job.process.pid, signal.SIGINT)
    job.check(
        f"{how}, Slurm",
        r"\*\*\* STEP \S+ ON node1 CANCELLED AT",
        "All ranks on all nodes end with it.",
    )


def test_a_whole_node_is_lost(breakable, tmp_path):
    job = on_slurm(breakable, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path)
    job.until("1 MB:")
    os.kill(breakable.pid("node2"), signal.SIGKILL)
    output = job.check(
        "a node is lost, Slurm",
        rf"^({LOST}) .*$",
        "Start again without that node: `--exclude` at `salloc`.",
    )
    assert f"{LAUNCHER.name}: line " not in output  # which bash says when it is killed


def test_a_whole_node_is_lost_under_torchrun(breakable, tmp_path):
    job = on_slurm(breakable, "salloc", "--nodes", 2, LAUNCHER, "--torchrun", "9", cwd=tmp_path)
    job.until("1 MB:")
    os.kill(breakable.pid("node2"), signal.SIGKILL)
    ended = wait_for(lambda: job.process.poll() is not None, 60)
    output = job.end()
    assert ended, output
    assert job.process.returncode != 0
    assert re.search(rf"^({LOST}) ", output, re.M), output
