"""Ranks, launchers and nodes that die, stop, fail or run out of memory."""

import os
import signal
import time

import pytest
from faults import IMPATIENT, lesson, local, nine_images, on_slurm
from support.mutants import write_mutant
from support.run import LAUNCHER, full
from support.slurm_cluster import bring_up

MEMORY = (
    "Often memory ran out: fewer processes, a smaller `--batch-size`, or with Slurm more memory, "
    "with `--mem` at `salloc`."
)
LONG = ("--epochs", 100)
KILLED = r"^The first to fail: rank {} on .* ended with signal KILL\.$"


@pytest.mark.parametrize(
    ("whom", "nodes", "command", "begun", "rank", "says"),
    [
        ("rank 1, Day 1", "", "1 2", "1 MB:", 1, r"process 1 terminated with signal SIGKILL$"),
        ("rank 0, `--local`", "2", "9", "1 MB:", 0, KILLED.format(0)),
    ],
)
def test_a_rank_is_killed(whom, nodes, command, begun, rank, says, tmp_path):
    words = command.split()
    job = local(nodes, *words, cwd=tmp_path) if nodes else lesson(*words, cwd=tmp_path)
    job.until(begun)
    job.hit("KILL", rank)
    job.check(f"kill -9 of {whom}", says, MEMORY)


def test_a_rank_of_day_1_raises_while_another_waits(tmp_path):
    line = "    value = torch.tensor(float(rank))\n"
    ouch = '    if rank == 1:\n        raise ValueError("ouch")\n'
    job = lesson("0", 2, cwd=tmp_path, file=write_mutant(tmp_path, "0", (line, line + ouch)))
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
        job.hit(how.removeprefix("kill -"))
    output = job.check(f"{how}, Day 1", None, "All ranks end with it.")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "begun", "what"),
    [
        ("9", "1 MB:", "a rank"),
        full("16 --max-steps 300", "by hand: loss", "a rank of lesson 16, in a group of a mesh,"),
        full("17", "GPipe, ", "a stage of lesson 17"),
    ],
)
def test_a_stopped_rank_is_seen_by_the_timeout(name, begun, what, tmp_path):
    job = local("2", *name.split(), cwd=tmp_path, env=IMPATIENT)
    job.until(begun)
    job.hit("STOP", rank=1)
    output = job.check(
        f"{what} hangs, `--local` (`DIST_TIMEOUT=6`)",
        r"^Still running: rank 1 on simulated node 1\.$",
        "The others have waited for this rank: see where it hangs, with "
        "[the guide](../../day1/GUIDE.md#when-it-hangs).",
    )
    assert "Timed out waiting 6000ms" in output


# What a data worker does before it reads: it waits; it dies.
ASLEEP, DEAD = "time.sleep(600)", "os._exit(3)"
READS = {
    "11": "        begin = chunk * self.chunk_size\n",
    "13": "        seed_all(self.seed, epoch, index)\n",
}
TOO_LATE = r"RuntimeError: DataLoader timed out after 6(.0)? seconds$"
STUCK = "Look above for a worker's error. `--workers 0` shows where it is stuck."


@pytest.mark.parametrize(
    ("name", "what", "line", "told", "says"),
    [
        full("11", "hangs", ASLEEP, (), TOO_LATE),
        full("13", "hangs", ASLEEP, (), TOO_LATE),
        full("13", "hangs; Ctrl-C twice", ASLEEP, ("INT", "INT"), None),
        full("13", "hangs; TERM twice", ASLEEP, ("TERM", "TERM"), None),
        ("13", "dies", DEAD, (), r"exited unexpectedly|^a data worker has died, "),
    ],
)
def test_no_rank_waits_for_a_data_worker_for_ever(name, what, line, told, says, tmp_path):
    line = f"        if torch.utils.data.get_worker_info():\n            {line}\n"
    file = write_mutant(tmp_path, name, (READS[name], line + READS[name]))
    env = {"DIST_TIMEOUT": "60"} if told else IMPATIENT
    if name == "11":
        few = ("--batch-size", 1, "--file", nine_images(tmp_path))
        job = local("2", file, *few, cwd=tmp_path, env=env)
    else:
        job = lesson(name, cwd=tmp_path, file=file, env=env)
    job.until("ranks: ")
    for number in told:
        time.sleep(4)
        job.hit(number)
    job.check(f"a data worker of lesson {name} {what} (`DIST_TIMEOUT=6`)", says, STUCK)


@pytest.mark.full
def test_a_job_of_slurm_is_stopped(slurm, tmp_path):
    job = on_slurm(slurm, "salloc", "--nodes", 2, LAUNCHER, "10", *LONG, cwd=tmp_path)
    job.until("ranks: ")
    job.ctrl_c()
    says = r"\*\*\* STEP \S+ ON node1 CANCELLED AT"
    job.check("Ctrl-C, Slurm", says, "All ranks on all nodes end with it.")


@pytest.mark.full
def test_a_whole_node_is_lost(tmp_path):
    with bring_up(2, "damaged") as slurm:
        job = on_slurm(slurm, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path)
        job.until("1 MB:")
        os.kill(slurm.pid("node2"), signal.SIGKILL)
        says = r"^(Slurm has lost node2, or cannot reach it\.|A node does not answer: see) .*$"
        do = "Start again without that node: `--exclude` at `salloc`."
        job.check("a node is lost, Slurm", says, do)
