"""Lesson 9 on imitated nodes, and on those of a real Slurm."""

import os
import re
import shlex

import pytest
from clusters import bring_up
from helpers import LAUNCHER, launch, proof_of

# Word for word what day2/README.md tells people to type, the account apart.
SALLOC = shlex.split(
    "salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=abc_g"
)


def places(output):
    """Return lesson 9's rows: [(rank, host, local rank), ...]."""
    rows = re.findall(r"^rank (\d+) of \d+ on (\S+), local rank (\d+), ", output, re.M)
    return [(int(rank), host, int(local)) for rank, host, local in rows]


@pytest.mark.parametrize(("nodes", "how"), [("2x2", []), ("2", ["--torchrun"])])
def test_lesson_9_on_imitated_nodes(nodes, how, tmp_path):
    status, output = launch("--local", nodes, *how, 9, cwd=tmp_path)
    assert status == 0, output
    count, each = (int(x) for x in f"{nodes}x1".split("x")[:2])
    assert [(rank, local) for rank, _, local in places(output)] == [
        (rank, rank % each) for rank in range(count * each)
    ]
    assert f"=> {count} nodes, {count * each} ranks: every rank holds" in output
    assert ("within a node, " in output) == (each > 1)
    assert "between nodes, " in output


def test_the_salloc_line_and_lesson_9(slurm, tmp_path):
    done = slurm.run(*SALLOC, LAUNCHER, "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == [(r, f"node{r // 4 + 1}", r % 4) for r in range(8)]
    assert proof_of(done.stdout).startswith("=> 2 nodes, 8 ranks: every rank holds 28; the sum")
    first, second, third = done.stdout.splitlines()[:3]
    assert first == "nodes: node1 node2, ranks on each: 4, in all: 8"
    assert re.fullmatch(r"meeting point: node1:\d+, interface eth0", second)
    assert third.startswith("each rank: 32 CPUs, ")


def test_srun_itself_may_call_the_launcher_and_a_slow_link_shows(slurm, tmp_path):
    """Lesson 9 sees the speed of the link between the nodes."""
    assert slurm.call("link", "800mbit").returncode == 0
    try:
        done = slurm.run("srun", "--nodes", 2, "--ntasks-per-node", 2, LAUNCHER, "9", cwd=tmp_path)
    finally:
        assert slurm.call("link", "off").returncode == 0
    assert done.returncode == 0, done.stderr
    assert [host for _, host, _ in places(done.stdout)] == ["node1", "node1", "node2", "node2"]
    within, between = (
        float(
            re.search(rf"{where}, 2 ranks, 64 MB: .*?([\d,.]+) MB/s", done.stdout)[1].replace(
                ",", ""
            )
        )
        for where in ("within a node", "between nodes")
    )
    assert 10 < between < 100  # 800 Mbit/s are 100 MB/s
    assert within > between


def test_three_nodes(tmp_path):
    cluster = bring_up(3, f"/run/local-slurm-three-{os.getpid()}")
    try:
        done = cluster.run("salloc", "--nodes", 3, LAUNCHER, "9", cwd=tmp_path)
    finally:
        cluster.call("down")
    assert done.returncode == 0, done.stderr
    assert [host for _, host, _ in places(done.stdout)] == ["node1", "node2", "node3"]


@pytest.mark.parametrize("how", [[], ["--torchrun"]])
def test_lesson_9_where_the_nodes_have_unequal_numbers_of_ranks(how, slurm, tmp_path):
    allocation = ("salloc", "-N", 2, "-n", 3, "--exclusive")
    done = slurm.run(*allocation, LAUNCHER, *how, "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == [(0, "node1", 0), (1, "node1", 1), (2, "node2", 0)]
    assert "within a node, 2 ranks, 64 MB: " in done.stdout
    assert "between nodes, 2 ranks, 64 MB: " in done.stdout
    assert proof_of(done.stdout).startswith("=> 2 nodes, 3 ranks: every rank holds 3; ")
