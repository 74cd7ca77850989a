"""Ranks, launchers and nodes that die, stop, fail or run out of memory; ports, and who listens."""

import ipaddress
import os
import signal
import socket

import psutil
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


@pytest.mark.parametrize("before", ["    value = ", "    wait = "], ids=["later", "unmet"])
def test_a_rank_of_day_1_raises_while_another_waits(before, tmp_path):
    ouch = '    if rank == 1:\n        raise ValueError("ouch")\n'
    job = lesson("0", 2, cwd=tmp_path, file=write_mutant(tmp_path, "0", (before, ouch + before)))
    fault = "an exception on rank 1, Day 1; rank 0 waits"
    fault += " for it to join" if "wait" in before else ""
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
    if how == "kill -KILL":  # nobody is left who could remove the folder where they met
        job.known += ("tmp",)
    output = job.check(f"{how}, Day 1", None, "All ranks end with it.")
    assert "Traceback" not in output


def test_a_stopped_rank_is_seen_by_the_timeout(tmp_path):
    """That every group has a timeout, those of a mesh too, is a matter of the lint."""
    job = local("2", "9", cwd=tmp_path, env=IMPATIENT)
    job.until("1 MB:")
    job.hit("STOP", rank=1)
    output = job.check(
        "a rank hangs, `--local` (`DIST_TIMEOUT=6`)",
        r"^Still running: rank 1 on simulated node 1\.$",
        "The others have waited for this rank: see where it hangs, with "
        "[the guide](../../day1/GUIDE.md#when-it-hangs).",
    )
    assert "Timed out waiting 6000ms" in output


# What a data worker does before it reads: it waits; it dies.
ASLEEP, DEAD = "time.sleep(600)", "os._exit(3)"
READS = {
    "11": "        chunks, batches = self.share(workers)\n",
    "13": "        name, epoch, index = key\n",
}
TOO_LATE = r"RuntimeError: DataLoader timed out after 6(.0)? seconds$"
STUCK = "Look above for a worker's error. `--workers 0` shows where it is stuck."


@pytest.mark.parametrize(
    ("name", "what", "line", "says"),
    [
        full("11", "hangs", ASLEEP, TOO_LATE),
        full("13", "hangs", ASLEEP, TOO_LATE),
        ("13", "dies", DEAD, "exited unexpectedly"),
    ],
)
def test_no_rank_waits_for_a_data_worker_for_ever(name, what, line, says, tmp_path):
    line = f"        if torch.utils.data.get_worker_info():\n            {line}\n"
    file = write_mutant(tmp_path, name, (READS[name], line + READS[name]))
    if name == "11":
        few = ("--batch-size", 1, "--file", nine_images(tmp_path))
        job = local("2", file, *few, cwd=tmp_path, env=IMPATIENT)
    else:
        job = lesson(name, cwd=tmp_path, file=file, env=IMPATIENT)
    job.check(f"a data worker of lesson {name} {what} (`DIST_TIMEOUT=6`)", says, STUCK)


def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path):
    few = ("--images", 3198, "--save-every", 5, "--lr", 1e9)
    job = local("2", "12", *few, cwd=tmp_path)
    job.until("ranks: 2")
    says = r"^The loss is not finite\. Take a smaller --lr\.$"
    do = "As it says. No snapshot has been written of it."
    output = job.check("the loss becomes NaN, lesson 12", says, do)
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("snapshot*"))


def test_a_port_in_use(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        job = local("2", "9", cwd=tmp_path, env={"MASTER_PORT": str(port)})
        says = r"^MASTER_PORT \d+ cannot be used: \[Errno 98\] Address already in use.*"
        do = "`unset MASTER_PORT`: the launcher finds a free one."
        job.check("MASTER_PORT is in use, `--local`", says, do)


@pytest.mark.parametrize("lesson_id", ["1", "9"])
def test_no_other_machine_can_reach_a_job_of_one_machine(lesson_id, tmp_path):
    """Where the ranks meet, and where they send: all of it listens on loopback addresses.

    Those that python starts meet in a file: nobody but gloo listens, once on each rank.
    """
    job = lesson("1", 2, cwd=tmp_path) if lesson_id == "1" else local("2", "9", cwd=tmp_path)
    job.until("1 MB:")
    found = {pid: psutil.Process(pid).net_connections() for pid in job.processes()}
    private = [x.stat().st_mode & 0o777 for x in job.temporary.glob("*/ranks")]
    private += [x.stat().st_mode & 0o777 for x in job.temporary.glob("tmp*")]
    job.end()
    listen = [(pid, x.laddr.ip) for pid in found for x in found[pid] if x.status == "LISTEN"]
    where = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for _, ip in listen]
    assert all(ip.is_loopback for ip in where), listen
    if lesson_id == "1":
        assert len(listen) == len({pid for pid, _ in listen}) == 2
        assert job.process.pid not in dict(listen)
        assert private == [0o644, 0o700]


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
