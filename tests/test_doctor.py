"""scripts/doctor.sh: says that all is well where it is, and names each fault that is planted."""

import os
import re
import shutil
import socket
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from clusters import bring_up
from doctor import table
from helpers import ROOT, copy_tree, run

DOCTOR = ROOT / "scripts" / "doctor.sh"


def diagnose(*arguments, cwd, command=DOCTOR, env=None):
    """Run the doctor. Return its exit status, output, and {check: what it says is wrong}."""
    status, output = run([command, *arguments], 90, cwd, env)
    assert not list(cwd.glob(".doctor*")), "it leaves a file"
    return status, output, dict(re.findall(r"^FAIL (.*?): (.*)$", output, re.M))


# On imitated nodes.


def test_all_is_well_on_imitated_nodes(tmp_path):
    status, output, problems = diagnose("--local", "2x2", cwd=tmp_path)
    assert (status, problems) == (0, {}), output
    assert len(re.findall(r"^ok   ", output, re.M)) == table.TOTAL
    assert output.endswith(f"\n=> ready: {table.TOTAL} checks ok, 4 ranks\n")
    assert f", h5py {version('h5py')}, " in output
    assert re.search(r"^ok   all_reduce: 5 times 4 MB in \d.* MB/s, gloo, cpu$", output, re.M)


# Is imported by every Python before all else; takes effect on rank 1.
HOOK = """
import os, sys, time
if os.environ.get("RANK") == "1" and "rank.py" in " ".join(sys.orig_argv):
    {what}
"""


def plant(folder, what):
    """Return the environment in which rank 1 of the doctor does this before all else."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK.format(what=what))
    return {"PYTHONPATH": str(folder / "hook")}


def test_what_is_wrong_is_said_all_at_once(tmp_path):
    """A package that one node cannot import, and no data."""
    home, elsewhere = tmp_path / "my course", tmp_path / "somewhere else"
    for folder in ("scripts", "day2"):
        copy_tree(ROOT / folder, home / folder)
    shutil.copy(ROOT / "requirements.txt", home)
    (home / "data").mkdir()
    shutil.copy(ROOT / "data" / "README.md", home / "data")
    elsewhere.mkdir()
    env = plant(tmp_path, 'sys.modules["h5py"] = None')
    command = home / "scripts" / "doctor.sh"
    status, output, problems = diagnose("--local", "2", cwd=elsewhere, command=command, env=env)
    assert status == 1
    assert set(problems) == {"data", "versions"}, output
    found = r"h5py [\d.]+ on imitated node 0; not usable \(.*\) on imitated node 1\. Use one"
    assert re.match(found, problems["versions"])
    assert "git checkout data/MNIST" in problems["data"]
    assert output.endswith(f"=> not ready: 2 of {table.TOTAL} checks failed\n")


def test_a_wrong_interface_is_named_with_those_that_there_are(tmp_path):
    env = {"GLOO_SOCKET_IFNAME": "nosuch0"}
    status, output, problems = diagnose("--local", "2", cwd=tmp_path, env=env)
    assert status == 1
    assert set(problems) == {"all_reduce"}, output
    assert "the interface nosuch0 (of lo" in problems["all_reduce"]


@pytest.mark.full
@pytest.mark.parametrize("what", ["time.sleep(100)", "os.kill(os.getpid(), 11)"])
def test_a_rank_that_hangs_or_dies_is_named(what, tmp_path):
    env = plant(tmp_path, what)
    status, output, problems = diagnose("--local", "2", cwd=tmp_path, env=env)
    assert status == 1
    assert "answers" in problems
    assert "rank 1 on imitated node 1" in output
    assert "\n=> not ready: " in output


def test_a_port_in_use_gets_one_sentence(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        env = {"MASTER_PORT": str(port)}
        status, _, problems = diagnose("--local", "1", cwd=tmp_path, env=env)
    assert status == 1
    assert problems["meeting point"].endswith(" Choose another port: export MASTER_PORT=29501")


@pytest.mark.parametrize("arguments", [("--no-such-option",), ("--local",), ("--local", "0"), ()])
def test_where_it_cannot_start_it_says_why(arguments, tmp_path):
    env = {name: "" for name in os.environ if name.startswith("SLURM_")}
    status, output, _ = diagnose(*arguments, cwd=tmp_path, env=env)
    assert status == 1
    assert "Traceback" not in output
    assert len(output.splitlines()) == 1


# The checks, with facts of two nodes that are made up.

VERSIONS = {"Python": "3.11.7", "torch": "2.15.0", "h5py": "3.16.0"}
OLD = {**VERSIONS, "torch": "2.5.1"}
BROKEN = {**VERSIONS, "h5py": "not usable (ImportError: libhdf5.so)"}
FOUR = [f"GPU-{number}" for number in range(4)]


def facts_of(rank, **changes):
    """Return what a rank of two prints, on a node of its own where all is well."""
    return {
        "rank": rank,
        "node": f"node{rank + 1}",
        "ranks": 2,
        "local_rank": 0,
        "local_ranks": 1,
        "several_hosts": True,
        "needed": {"Python": "3.11", "torch": "2.6", "h5py": ""},
        "versions": VERSIONS,
        "has_gpus": True,
        "hidden": False,
        "built": True,
        "gpus": FOUR,
        "backend": "nccl",
        "cpus": 8,
        "cpus_of_node": 16,
        "cpus_asked": 8,
        "threads": 8,
        "folder": "/home/me",
        "writes": True,
        "shares": True,
        "damaged": [],
        "shm": 2**30,
        "infiniband": True,
        "lockable": -1,
        "met": True,
        "where": "node1 is 10.0.0.1 there, the interface eth0 (of lo, eth0)",
        "speed": "5 times 4 MB",
        "clock": 1000.0,
        **changes,
    }


def problems_of(*ranks):
    """Return {check: what it says is wrong} of ranks that should be on node1 and node2."""
    found = table.make_table(["node1", "node2"], list(ranks))
    return {name: problem for name, _, problem in found if problem}


SAME = {"node": "node1", "local_rank": 1, "local_ranks": 2}
TIMED_OUT = {"met": False, "speed": None, "error": "timed out after 20 s"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("versions", {"versions": OLD}, "torch 2.15.0 on node1; 2.5.1 on node2. Version 2.6 or"),
        ("versions", {"versions": {**VERSIONS, "torch": "2.7.0"}}, "2.7.0 on node2. Use one envir"),
        ("versions", {"versions": {**VERSIONS, "Python": "3.10.1"}}, "Version 3.11 or newer is"),
        ("versions", {"versions": BROKEN}, "not usable (ImportError: libhdf5.so) on node2. Use"),
        ("GPUs", {"gpus": []}, "torch sees none on node2, which has some. Ask for them"),
        ("GPUs", {"gpus": [], "built": False}, "on node2 is for CPUs only, and there are GPUs."),
        ("GPUs", {"gpus": ["a", "b"]}, "4 on node1; 2 on node2. Ask for as many"),
        ("GPUs", {**SAME, "local_rank": 0}, "ranks 0, 1 on node1 use only GPU-0. Let each"),
        ("CPUs", {"cpus": 1, "threads": 1}, "1, although 8 were asked for on node2. See --cpu-b"),
        ("CPUs", {"threads": 9}, "9 threads for each rank, which has 8 on node2. They take turns"),
        ("shared files", {"shares": False}, "/home/me is not seen on node2. Go to a folder on"),
        ("shared files", {"writes": False}, "you cannot write to /home/me on node2. Go to"),
        ("data", {"damaged": ["x-ubyte"]}, "x-ubyte missing or damaged on node2. Restore it"),
        ("/dev/shm", {"shm": 2**20}, "less than 32 MB free on node2. Remove"),
        ("locked memory", {"lockable": 2**23}, "only 8 MB, too little for InfiniBand on node2."),
        ("meeting point", TIMED_OUT, "rank 1 on node2: timed out after 20 s. node1 is 10.0.0.1"),
        ("clocks", {"clock": 1060.0}, "that of node2 is 60 s ahead of that of node1. Ask"),
    ],
)
def test_a_check_names_the_node_and_what_to_do(name, changes, words):
    problems = problems_of(facts_of(0), facts_of(1, **changes))
    assert set(problems) == {name}
    assert words in problems[name]


def test_what_is_no_fault_is_not_called_one():
    assert problems_of(facts_of(0), facts_of(1)) == {}
    hidden = {"gpus": [], "hidden": True, "backend": "gloo"}
    assert problems_of(facts_of(0, **hidden), facts_of(1, **hidden)) == {}
    for changes in ({"infiniband": False}, {"several_hosts": False}, {"lockable": 2**40}):
        assert problems_of(facts_of(0), facts_of(1, **{"lockable": 2**16, **changes})) == {}
    # Nodes with unequal numbers of GPUs, each with a rank of its own; and a GPU that ranks share.
    ranks = [facts_of(0, gpus=["a", "b"]), facts_of(1, **SAME, gpus=["a", "b"])]
    ranks.append(facts_of(2, node="node2", gpus=["c"]))
    assert table.check_gpus(ranks)[0] == "2 on node1; 1 on node2, a different one for each rank"
    ranks = [facts_of(0, gpus=["a"]), facts_of(1, **SAME, gpus=["a"])]
    assert table.check_gpus(ranks)[0] == "1 on node1, shared by 2 ranks through gloo: slow"


def test_gloo_is_named_where_each_rank_has_a_gpu_of_its_own():
    """Slurm shows each task one GPU, and does not say how many the node has."""
    ranks = [facts_of(0, gpus=["a"], backend="gloo"), facts_of(1, gpus=["b"], backend="gloo")]
    ranks[1].update(SAME)
    problem = table.check_gpus(ranks)[1]
    assert "ranks 0, 1 on node1 has its own, but they would talk through gloo" in problem
    assert problem.endswith("export SLURM_GPUS_ON_NODE=2")
    # Each sees both: so it is this torch that has no backend for them, as Intel's before 2.8.
    for rank in ranks:
        rank["gpus"] = ["a", "b"]
    assert "this torch has nothing else for them" in table.check_gpus(ranks)[1]


def test_ranks_that_do_not_answer_are_looked_for_on_their_nodes():
    nodes = table.expand_nodes("node1 node2 node3", "3 2 2", "7")
    came = [facts_of(rank) for rank in range(7) if rank not in (2, 5)]
    problem = table.check_answers(nodes, came)[1]
    assert problem.startswith("rank 2, 5 on node1, node3 gave none. ")


# Nodes of a real Slurm.


@pytest.fixture(scope="module")
def cluster():
    """A Slurm cluster of two nodes, in which a test may plant a fault."""
    slurm = bring_up(2, Path(f"/run/doctor-test-{os.getpid()}"))
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--time=5"]
    shell = [ROOT / "scripts" / "local_slurm.sh", "shell", "env"]

    def on_nodes(cwd, **variables):
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = [*shell, f"PYTHON={sys.executable}", *settings, *salloc, DOCTOR]
        status, output = run(command, 120, cwd, slurm.env)
        return status, output, dict(re.findall(r"^FAIL (.*?): (.*)$", output, re.M))

    def inside(node, *command):
        """Run a command with the network of one node."""
        pid = (slurm.folder / f"node{node}.pid").read_text().strip()
        status, output = run(["nsenter", "--target", pid, "--net", *command], 10, ROOT, None)
        assert status == 0, output

    yield types.SimpleNamespace(on_nodes=on_nodes, inside=inside)
    slurm.call("down")


@pytest.mark.full
def test_all_is_well_on_the_nodes_of_a_cluster(cluster, tmp_path):
    status, output, problems = cluster.on_nodes(tmp_path)
    assert (status, problems) == (0, {}), output
    assert output.endswith(f"\n=> ready: {table.TOTAL} checks ok, 2 ranks\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("ports", "name"),
    [(["29555"], "meeting point"), (["1024-29554", "29556-65000"], "all_reduce")],
)
def test_a_firewall_between_nodes_is_found(ports, name, cluster, tmp_path):
    # What node 1 answers from these ports is dropped, as a firewall does it.
    rules = [f"to 10.77.0.2 ipproto tcp sport {port} blackhole".split() for port in ports]
    for rule in rules:
        cluster.inside(1, "ip", "rule", "add", *rule)
    try:
        status, output, problems = cluster.on_nodes(tmp_path, MASTER_PORT="29555")
    finally:
        for rule in rules:
            cluster.inside(1, "ip", "rule", "delete", *rule)
    assert status == 1
    assert set(problems) == {name}, output
    assert " on node2: " in problems[name] or name == "all_reduce"
    assert "node1 is 10.77.0.1 there, the interface eth0" in problems[name]
