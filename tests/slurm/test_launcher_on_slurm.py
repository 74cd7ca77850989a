"""A real Slurm: what people type in an allocation."""

import json
import os
import re
import shlex
import sys
from itertools import groupby

import pytest
from support.cases import arguments_of
from support.run import (
    LAUNCHER,
    LESSONS,
    ROOT,
    proof_of,
    proves,
    require_programs,
    skip_or_fail_in_ci,
)

# Word for word what day2/NODES.md tells people to type. A shell reads it, as if it were pasted.
NODES = (ROOT / "day2" / "NODES.md").read_text()
SALLOC = ["bash", "-c", re.search("^salloc --nodes 2 .*$", NODES, re.M)[0] + ' "$@"', "bash"]


def run_in(slurm, *command, cwd):
    """Run a command on the login side, which must end well; return what it prints."""
    done = slurm.run(*command, cwd=cwd, timeout=200)
    if done.returncode == os.EX_UNAVAILABLE:
        skip_or_fail_in_ci(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def places(output):
    """Return lesson 9's rows: [(rank, host, local rank), ...]."""
    rows = re.findall(r"^rank (\d+) of \d+ on (\S+), local rank (\d+), ", output, re.M)
    return [(int(rank), host, int(local)) for rank, host, local in rows]


def test_the_salloc_line_and_lesson_9(slurm, tmp_path):
    typed = 'srun hostname; "$0" 9 --rounds 1'
    output = run_in(slurm, *SALLOC, "sh", "-c", typed, LAUNCHER, cwd=tmp_path)
    lines = output.splitlines()
    assert sorted(lines[:8]) == ["node1"] * 4 + ["node2"] * 4
    assert lines[8] == "nodes: node1 node2, ranks on each: 4, in all: 8"
    assert re.fullmatch(r"rendezvous: node1:\d+, interface eth0", lines[9])
    assert lines[10].startswith("each rank: 32 CPUs, ")
    assert places(output) == [(rank, f"node{rank // 4 + 1}", rank % 4) for rank in range(8)]
    assert proof_of(output).startswith("=> 2 nodes, 8 ranks: every rank holds 28; the sum")
    assert proves(output)


# Prints some of its variables in one short piece: longer lines of several ranks may mix.
SHOW = """import json, os, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
found = {name: os.environ.get(name) for name in names} | {"HOST": socket.gethostname()}
os.write(1, (json.dumps(found) + "\\n").encode())
"""


@pytest.fixture
def show(tmp_path):
    """A script that prints the variables of a rank."""
    file = tmp_path / "show.py"
    file.write_text(SHOW)
    return file


def check_ranks(output, counts):
    """Assert that each node has so many ranks, numbered in a row."""
    ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    ranks.sort(key=lambda rank: int(rank["RANK"]))
    total = sum(counts)
    assert [rank["RANK"] for rank in ranks] == [str(number) for number in range(total)], output
    assert {rank["WORLD_SIZE"] for rank in ranks} == {str(total)}
    nodes = [[*group] for _, group in groupby(ranks, lambda rank: rank["HOST"])]
    assert [len(node) for node in nodes] == counts
    for node in nodes:
        assert [rank["LOCAL_RANK"] for rank in node] == [str(number) for number in range(len(node))]
        assert {rank["LOCAL_WORLD_SIZE"] for rank in node} == {str(len(node))}
    each = counts[:1] if len({*counts}) == 1 else counts
    assert f"ranks on each: {' '.join(map(str, each))}, in all: {total}\n" in output


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("-N 2 -n 5 --exclusive", [3, 2]),
        ("-N 2 --gpus-per-node 4", [4, 4]),  # nobody asked for tasks
        ("-N 2 --ntasks-per-node 2 --gpus-per-task 1", [2, 2]),
        ("-N 2", [1, 1]),
    ],
)
def test_as_many_ranks_as_tasks_else_as_gpus_else_as_nodes(options, counts, slurm, show, tmp_path):
    check_ranks(run_in(slurm, "salloc", *options.split(), LAUNCHER, show, cwd=tmp_path), counts)


def test_torchrun_on_unequal_nodes_and_a_slow_link(slurm, tmp_path):
    command = ["salloc", "-N", 2, "-n", 3, "--exclusive", "env", "MASTER_PORT=29555"]
    command += ["MASTER_ADDR=10.77.0.1", LAUNCHER, "--torchrun", "9"]
    assert slurm.call("link", "800mbit").returncode == 0
    try:
        output = run_in(slurm, *command, "--rounds", 1, cwd=tmp_path)
    finally:
        assert slurm.call("link", "off").returncode == 0
    assert "\nrendezvous: 10.77.0.1:29555, interface eth0\n" in output  # where the user says
    assert places(output) == [(0, "node1", 0), (1, "node1", 1), (2, "node2", 0)]
    assert proof_of(output).startswith("=> 2 nodes, 3 ranks: every rank holds 3; ")
    assert proves(output)
    speed = re.search(r"between nodes, 2 ranks, 64 MB: .*?([\d,.]+) MB/s", output)[1]
    assert float(speed.replace(",", "")) < 100  # 800 Mbit/s


def test_in_a_shell_of_srun_the_launcher_is_no_rank(slurm, show, tmp_path):
    """It starts the ranks of the whole job."""
    require_programs("script")
    shell = "srun -N 2 --ntasks-per-node 2 -c 2 --pty bash --norc"
    python = shlex.quote(sys.executable)
    typed = f"PYTHON={python} {shlex.quote(str(LAUNCHER))} show.py >said.txt 2>&1; exit\n"
    done = slurm.run("script", "-qec", shell, "/dev/null", input=typed, cwd=tmp_path)
    assert (tmp_path / "said.txt").exists(), done.stdout
    check_ranks((tmp_path / "said.txt").read_text(), [2, 2])


@pytest.mark.full
@pytest.mark.parametrize(
    "lesson_id",
    [x for x in LESSONS if "nodes" in LESSONS[x] and x != "9"],  # which is above
)
def test_each_lesson_runs_on_nodes(lesson_id, slurm, tmp_path, tmp_path_factory):
    command = (LAUNCHER, *LESSONS[lesson_id].get("launcher", []), lesson_id)
    few = arguments_of(lesson_id, tmp_path_factory, folder=tmp_path)
    # What makes a file is started once.
    nodes = ["node1"] if lesson_id.startswith("create") else ["node1", "node2"]
    output = run_in(slurm, "salloc", "--nodes", len(nodes), *command, *few, cwd=tmp_path)
    assert proves(output), output
    assert f"nodes: {' '.join(nodes)}, ranks on each: 1, in all: {len(nodes)}\n" in output
