"""Ports in use, names that cannot be resolved, a link that is cut."""

import ipaddress
import socket
import subprocess

import psutil
import pytest
from faults import IMPATIENT, lesson, local, on_slurm
from support.run import LAUNCHER, full

BY_HAND = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}


def test_a_port_in_use(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        job = local("2", "9", cwd=tmp_path, env={"MASTER_PORT": str(port)})
        says = r"^MASTER_PORT \d+ cannot be used: \[Errno 98\] Address already in use.*"
        do = "`unset MASTER_PORT`: the launcher finds a free one."
        job.check("MASTER_PORT is in use, `--local`", says, do)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "address"),
    [
        ("MASTER_ADDR cannot be resolved", "nosuch.invalid"),
        ("nobody answers at MASTER_ADDR", "127.0.0.2"),
    ],
)
def test_rank_0_is_not_found(fault, address, tmp_path):
    job = lesson("9", cwd=tmp_path, env=BY_HAND | IMPATIENT | {"MASTER_ADDR": address})
    job.check(
        f"{fault}, started by hand (`DIST_TIMEOUT=6`)",
        rf"The client socket has timed out after 6000ms while trying to connect to \({address}",
        "`srun getent hosts node1`, with that name. Is rank 0 running?",
    )


@pytest.mark.full
def test_the_link_is_cut_in_the_middle(disposable_cluster, tmp_path):
    job = on_slurm(
        disposable_cluster, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path, env=IMPATIENT
    )
    job.until("1 MB:")
    inside = ["nsenter", "--target", str(disposable_cluster.pid("login")), "--net"]
    subprocess.run([*inside, "ip", "link", "set", "node2", "down"], check=True)
    output = job.check(
        "the link to a node is cut, Slurm (`DIST_TIMEOUT=6`)",
        r"^(Slurm has lost node2, or cannot reach it\.|A node does not answer: see) .*$",
        "Start again without that node: `--exclude` at `salloc`.",
    )
    assert "Timed out waiting 6000ms" in output


@pytest.mark.parametrize("lesson_id", [full("4"), "9"])
def test_no_other_machine_can_reach_a_job_of_one_machine(lesson_id, tmp_path):
    """Where the ranks meet, and where they send: all of it listens on loopback addresses."""
    job = lesson("4", 2, cwd=tmp_path) if lesson_id == "4" else local("2", "9", cwd=tmp_path)
    job.until("epoch 0:" if lesson_id == "4" else "1 MB:")
    connections = [x for pid in job.processes() for x in psutil.Process(pid).net_connections()]
    job.end()
    listen = [x.laddr.ip for x in connections if x.status == psutil.CONN_LISTEN]
    assert len(listen) > 2  # the store, and one of each rank
    assert all(ipaddress.ip_address(x.removeprefix("::ffff:")).is_loopback for x in listen), listen
