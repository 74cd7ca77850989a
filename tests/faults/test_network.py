"""Ports in use, names that cannot be resolved, nodes out of reach, a link that is cut."""

import shlex
import socket
import subprocess

import pytest
from catalogue import PATIENCE, lesson, local, on_slurm
from helpers import LAUNCHER

BY_HAND = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
UNTIL_LOST = "Start again without that node: `--exclude` at `salloc`."


def test_a_port_in_use(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        job = local("2", "9", cwd=tmp_path, env={"MASTER_PORT": str(port)})
        job.check(
            "MASTER_PORT is in use, `--local`",
            r"message: address already in use(?s:.*)^The first to fail: rank 0 .*",
            "`unset MASTER_PORT`: the launcher finds a free one.",
        )


@pytest.mark.parametrize(
    ("fault", "address"),
    [
        ("MASTER_ADDR cannot be resolved", "nosuch.invalid"),
        ("nobody answers at MASTER_ADDR", "127.0.0.2"),
    ],
)
def test_rank_0_is_not_found(fault, address, tmp_path):
    job = lesson("9", cwd=tmp_path, env=BY_HAND | PATIENCE | {"MASTER_ADDR": address})
    job.check(
        f"{fault}, started by hand (`DIST_TIMEOUT=6`)",
        rf"The client socket has timed out after 6000ms while trying to connect to \({address}",
        "`srun getent hosts node1`, with that name. Is rank 0 running?",
    )


def set_link(cluster, state):
    inside = ["nsenter", "--target", str(cluster.pid("login")), "--net"]
    subprocess.run([*inside, "ip", "link", "set", "node2", state], check=True)


def test_a_node_is_out_of_reach_when_a_job_starts(breakable, tmp_path):
    job = on_slurm(breakable, "salloc", "--nodes", 2, "bash", cwd=tmp_path, typed=True)
    job.until("Granted")
    set_link(breakable, "down")
    job.type(f"{shlex.quote(str(LAUNCHER))} 9; exit $?")
    job.check(
        "a node is out of reach when the lesson starts, Slurm",
        r"Task launch for \S+ failed on node node2: Communication connection failure"
        r"(?s:.*)^Slurm has lost node2, or cannot reach it\.",
        UNTIL_LOST,
    )


def test_the_link_is_cut_in_the_middle(breakable, tmp_path):
    job = on_slurm(breakable, "salloc", "--nodes", 2, LAUNCHER, "9", cwd=tmp_path, env=PATIENCE)
    job.until("1 MB:")
    set_link(breakable, "down")
    output = job.check(
        "the link to a node is cut, Slurm (`DIST_TIMEOUT=6`)",
        r"^(Slurm has lost node2, or cannot reach it\.|A node does not answer: see) .*$",
        UNTIL_LOST,
    )
    assert "Timed out waiting 6000ms" in output
