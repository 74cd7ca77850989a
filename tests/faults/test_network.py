"""Ports in use, names that cannot be resolved, nodes out of reach, a link that is cut."""

import socket
import subprocess

import psutil
import pytest
from faults import IMPATIENT, lesson, local, on_slurm
from helpers import LAUNCHER

BY_HAND = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
WITHOUT_IT = "Start again without that node: `--exclude` at `salloc`."


def test_a_port_in_use(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        job = local("2", "9", cwd=tmp_path, env={"MASTER_PORT": str(port)})
        says = r"message: address already in use(?s:.*)^The first to fail: rank 0 .*"
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


def cut_link(cluster):
    inside = ["nsenter", "--target", str(cluster.pid("login")), "--net"]
    subprocess.run([*inside, "ip", "link", "set", "node2", "down"], check=True)


@pytest.mark.full
def test_a_node_is_out_of_reach_when_a_job_starts(breakable, tmp_path):
    (go := tmp_path / "go").mkdir()
    wait = f"echo waits; while test -d '{go}'; do sleep 0.1; done; exec \"$0\" 9"
    job = on_slurm(breakable, "salloc", "--nodes", 2, "sh", "-c", wait, LAUNCHER, cwd=tmp_path)
    job.until("waits")
    cut_link(breakable)
    go.rmdir()
    job.check(
        "a node is out of reach when the lesson starts, Slurm",
        r"Task launch for \S+ failed on node node2: Communication connection failure"
        r"(?s:.*)^Slurm has lost node2, or cannot reach it\.",
        WITHOUT_IT,
    )


@pytest.mark.full
def test_the_link_is_cut_in_the_middle(breakable, tmp_path):
    job = on_slurm(breakable, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path, env=IMPATIENT)
    job.until("1 MB:")
    cut_link(breakable)
    output = job.check(
        "the link to a node is cut, Slurm (`DIST_TIMEOUT=6`)",
        r"^(Slurm has lost node2, or cannot reach it\.|A node does not answer: see) .*$",
        WITHOUT_IT,
    )
    assert "Timed out waiting 6000ms" in output


def test_ranks_listen_on_the_interface_that_the_launcher_names(tmp_path):
    """All but one port: PyTorch's TCPStore, the meeting point, listens on all addresses."""
    job = local("2", "9", cwd=tmp_path)
    job.until("1 MB:")
    found = []
    for pid in job.processes():
        connections = psutil.Process(pid).net_connections("inet")
        found += [x.laddr.ip for x in connections if x.status == psutil.CONN_LISTEN]
    job.end()
    here = [address for address in found if address in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
    everywhere = [address for address in found if address in ("0.0.0.0", "::")]
    assert here
    assert len(everywhere) == 1
    assert len(here) + len(everywhere) == len(found), found
