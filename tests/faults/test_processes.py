"""Ranks, launchers and nodes that die, stop, fail or run out of memory."""

import os
import resource
import signal
from pathlib import Path

import pytest
from faults import IMPATIENT, Job, lesson, local, on_slurm
from helpers import LAUNCHER, LESSONS, ROOT, wait_for
from mutants import write_mutant

MEMORY = "Often memory ran out: fewer processes, or a smaller `--batch-size`."
FIRST = "Look above for what this rank says itself."
LOST = r"Slurm has lost node2, or cannot reach it\.|A node does not answer: see"
LONG = ("--epochs", 100)
# What a rank of lessons 0 and 9 does first, and a line that makes rank 1 fail there.
BEGIN = {
    "0": "    before = value.item()\n",
    "9": "    value = torch.tensor(float(rank), device=device)\n",
}
OUCH = '    if rank == 1:\n        raise ValueError("ouch")\n'


def fails_on_rank_1(lesson_id, folder):
    """Write a lesson in which rank 1 raises; return the file."""
    return write_mutant(folder, lesson_id, (BEGIN[lesson_id], BEGIN[lesson_id] + OUCH))


# Day 1: the lesson starts its own ranks.


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_of_day_1_is_killed(rank, tmp_path):
    job = lesson("1", 2, cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    says = rf"process {rank} terminated with signal SIGKILL$"
    job.check(f"kill -9 of rank {rank}, Day 1", says, MEMORY, status=1)


def test_a_rank_of_day_1_raises_while_another_waits(tmp_path):
    job = lesson("0", 2, cwd=tmp_path, file=fails_on_rank_1("0", tmp_path))
    fault = "an exception on rank 1, Day 1; rank 0 waits"
    do = "Above stands the rank, `-- Process 1 terminated`, and the line."
    output = job.check(fault, "^ValueError: ouch$", do, status=1)
    assert "-- Process 1 terminated with the following error:" in output


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -TERM", "kill -KILL"])
def test_a_lesson_of_day_1_is_stopped(how, tmp_path):
    job = lesson("4", 2, *LONG, cwd=tmp_path)
    job.until("ranks: ")
    if how == "Ctrl-C":
        job.ctrl_c()
    else:
        job.process.send_signal(getattr(signal, "SIG" + how.removeprefix("kill -")))
    output = job.check(f"{how}, Day 1", None, "All ranks end with it.")
    assert "Traceback" not in output


@pytest.mark.full
@pytest.mark.parametrize("command", [(LAUNCHER, "--local", 2, 9), ("day1", "1", 2)], ids=str)
def test_ctrl_c_leaves_alone_what_a_script_runs_in_the_background(command, tmp_path):
    """A script starts a command before & so that it ignores Ctrl-C. It must not change that."""
    if command[0] == "day1":
        command = ("python", "-u", ROOT / LESSONS["1"]["file"], 2)
    job = Job("sh", "-c", 'trap "" INT; exec "$@"', "sh", *command, cwd=tmp_path)
    job.until("4 kB:")
    job.ctrl_c()
    job.check("Ctrl-C, in the background", "^=> ", "Nothing: a script's `&` ignores it.", status=0)


# The launcher of Day 2, on imitated nodes.


def test_a_rank_on_an_imitated_node_is_killed(tmp_path):
    job = local("2", "9", cwd=tmp_path)
    job.until("1 MB:")
    job.hit(0, "KILL")
    says = r"^The first to fail: rank 0 on imitated node 0 ended with signal KILL\.$"
    job.check("kill -9 of rank 0, `--local`", says, MEMORY)


def test_a_rank_on_an_imitated_node_raises(tmp_path):
    job = local("2", fails_on_rank_1("9", tmp_path), cwd=tmp_path)
    fault = "an exception on rank 1, `--local`; rank 0 waits"
    says = r"^The first to fail: rank 1 on imitated node 1 ended with exit status 1\.$"
    assert "[rank1]: ValueError: ouch" in job.check(fault, says, FIRST)


def test_a_stopped_rank_is_seen_by_the_timeout(tmp_path):
    job = local("2", "9", cwd=tmp_path, env=IMPATIENT)
    job.until("1 MB:")
    job.hit(1, "STOP")
    output = job.check(
        "a rank hangs, `--local` (`DIST_TIMEOUT=6`)",
        r"^Still running: rank 1 on imitated node 1\.$",
        "The others have waited for this rank: see where it hangs, with "
        "[the guide](../../day1/GUIDE.md#when-it-hangs).",
    )
    assert "Timed out waiting 6000ms" in output


@pytest.mark.full
def test_a_rank_runs_out_of_memory(tmp_path):
    job = local("2", "9", cwd=tmp_path)
    job.until("rank 1 of 2")
    rank = job.rank(1)
    # No more than it has now, and a little.
    size = int(Path(f"/proc/{rank}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(rank, resource.RLIMIT_AS, (size + 2**24, size + 2**24))
    says = r"^The first to fail: rank 1 on imitated node 1 ended with exit status 1\.$"
    do = FIRST + " Then fewer processes, or a smaller `--batch-size`."
    output = job.check("rank 1 gets no more memory, `--local`", says, do)
    assert "can't allocate memory: you tried to allocate 64000000 bytes" in output


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun_is_killed(rank, tmp_path):
    job = local("1x2", "--torchrun", "9", cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    says = rf"rank      : {rank} \(local_rank: {rank}\)(?s:.*)Signal 9 \(SIGKILL\) received"
    job.check(f"kill -9 of rank {rank}, torchrun", says, MEMORY)


# A real Slurm.


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_on_a_node_is_killed(rank, slurm, tmp_path):
    job = on_slurm(slurm, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path)
    job.until("1 MB:")
    job.hit(rank, "KILL")
    says = rf"^The first to fail: rank {rank} on node{rank + 1} ended with signal KILL\.$"
    job.check(f"kill -9 of rank {rank}, Slurm", says, MEMORY + " `--mem` at `salloc`.")


@pytest.mark.full
@pytest.mark.parametrize("how", ["scancel", "Ctrl-C"])
def test_a_job_of_slurm_is_stopped(how, slurm, tmp_path):
    command = ("salloc", "--nodes", 2, "-J", how, LAUNCHER, "10", *LONG)
    job = on_slurm(slurm, *command, cwd=tmp_path)
    job.until("ranks: ")
    if how == "scancel":
        slurm.run("scancel", "--name", how, cwd=tmp_path)
    else:
        job.ctrl_c()
    says = r"\*\*\* STEP \S+ ON node1 CANCELLED AT"
    job.check(f"{how}, Slurm", says, "All ranks on all nodes end with it.")


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--torchrun",)], ids=["srun", "torchrun"])
def test_a_whole_node_is_lost(options, breakable, tmp_path):
    job = on_slurm(breakable, "salloc", "--nodes", 2, LAUNCHER, *options, "9", cwd=tmp_path)
    job.until("1 MB:")
    os.kill(breakable.pid("node2"), signal.SIGKILL)
    if options:  # the torchrun that is left says much more, and takes longer
        assert wait_for(lambda: job.status is not None, 60), job.output
        job.end()
        assert job.status
        assert "node2" in job.output
    else:
        do = "Start again without that node: `--exclude` at `salloc`."
        job.check("a node is lost, Slurm", rf"^({LOST}) .*$", do)
