"""Ports in use, names that cannot be resolved, and who can reach a job."""

import ipaddress
import socket

import psutil
import pytest
from faults import lesson, local


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
