"""Ports in use, names that cannot be resolved, and who can reach a job."""

import ipaddress
import socket

import psutil
import pytest
from faults import lesson, local
from support.run import full


def test_a_port_in_use(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        job = local("2", "9", cwd=tmp_path, env={"MASTER_PORT": str(port)})
        says = r"^MASTER_PORT \d+ cannot be used: \[Errno 98\] Address already in use.*"
        do = "`unset MASTER_PORT`: the launcher finds a free one."
        job.check("MASTER_PORT is in use, `--local`", says, do)


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
