"""scripts/doctor.sh: says that all is well where it is, and names each fault that is planted."""

import contextlib
import io
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from doctor import doctor
import pytest
from clusters import bring_up
from helpers import ROOT, copy_tree, load, processes_of, wait_for
from doctor import checks
from doctor import facts
from launcher.gpus import MASKS

DOCTOR = ROOT / "scripts" / "doctor.sh"
LOCAL_SLURM = ROOT / "scripts" / "local_slurm.sh"
SALLOC = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32"]
SALLOC += ["--gpus-per-node=4", "--time=5"]
PORT = 29555  # where a test has to know it; the nodes of its cluster have all ports to themselves


def files_in(folder):
    """Return the files and folders in a folder. Python may keep what it has compiled there."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def run(*command, cwd, env=None, timeout=60):
    """Run a command to its end; return (exit status, output). It leaves no process, no file."""
    before = files_in(cwd)
    process = subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        for pid in processes_of(process.pid) if process.poll() is None else []:
            os.kill(pid, 9)
    assert wait_for(lambda: not processes_of(process.pid), 5), "processes are left behind"
    assert files_in(cwd) == before
    return process.returncode, output


def failures(output):
    """Return {name of a check: what it says} of the lines that begin with FAIL."""
    return dict(re.findall(r"^FAIL (.*?): (.*)$", output, re.M))


def is_well(status, output, ranks):
    """Return whether every check is ok, with one line each."""
    names = re.findall(r"^ok   (.*?): ", output, re.M)
    return (
        status == 0
        and names == ["meeting point", *checks.CHECKS, "all_reduce"]
        and output.endswith(f"\n=> ready: {len(names)} checks ok, {ranks} ranks\n")
    )


@pytest.mark.parametrize(("local_rank", "gpu", "built"), [(0, 0, "13.2"), (3, 1, None)])
def test_a_gpu_makes_its_context_before_the_time_for_the_all_reduce(
    monkeypatch, local_rank, gpu, built
):
    """There are no GPUs here: PyTorch is made to say that there are two."""
    import torch

    happened = []
    answers = {"device_count": 2, "current_accelerator": torch.device("cuda")}
    fake = mock.Mock(**{f"{name}.return_value": value for name, value in answers.items()})
    monkeypatch.setattr(torch, "accelerator", fake)
    monkeypatch.setattr(torch, "zeros", lambda size, device: happened.append(str(device)))
    monkeypatch.setattr(facts, "PACKAGES", [])
    monkeypatch.setattr(facts, "LOCAL_RANK", local_rank)
    monkeypatch.setattr(facts, "find_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(facts, "choose_device", lambda: (None, "nccl"))
    monkeypatch.setattr(facts, "tell", lambda **told: happened.extend(told.items()))
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    monkeypatch.setattr(facts.signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    facts.be_the_child()
    told = [("gpus", ["0", "1"]), ("backend", "nccl"), ("built", bool(built))]
    assert happened == [f"cuda:{gpu}", *told]


# Imitated nodes.


def test_all_is_well_on_imitated_nodes(tmp_path):
    status, output = run(DOCTOR, "--local", "2x1", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert is_well(status, output, ranks=2), output
    assert re.search(r"^ok   all_reduce: \d+ times 4 MB in \d\.\d s, [\d,]+ MB/s, ", output, re.M)
    others = re.search(r"^ok   other packages: (.*), the same on every node$", output, re.M)[1]
    assert others.split(", ") == [f"{name} {version(name)}" for name in facts.OTHERS]
    always = re.findall(r"^([\w-]+)[^;\n]*$", (ROOT / "requirements.txt").read_text(), re.M)
    assert set(always) <= {*facts.FIRST, *facts.OTHERS}


def test_a_torchvision_that_one_rank_cannot_import_is_named_with_all_else_that_is_wrong(tmp_path):
    """In a folder without data, and with an interface that there is not."""
    home, elsewhere = tmp_path / "my course", tmp_path / "somewhere else"
    for folder in ("scripts", "day2"):
        copy_tree(ROOT / folder, home / folder)
    shutil.copy(ROOT / "requirements.txt", home)
    elsewhere.mkdir()
    env = {
        "PYTHONPATH": other_packages(tmp_path, 'os.environ.get("RANK") == "1"', "torchvision"),
        "GLOO_SOCKET_IFNAME": "nosuch0",
        "OMP_NUM_THREADS": "1",
    }
    command = home / "scripts" / "doctor.sh"
    status, output = run(command, "--local", "2", cwd=elsewhere, env=env)
    assert status == 1
    found = failures(output)
    assert set(found) == {"torchvision", "interface", "data"}, output
    assert "not usable (AttributeError: " in found["torchvision"]
    assert "on imitated node 1. Use one environment" in found["torchvision"]
    assert found["interface"].startswith("nosuch0 has no address on imitated node 0")
    assert "git checkout data/MNIST" in found["data"]
    assert output.endswith("=> not ready: 3 of 13 checks failed\n")
    assert "all_reduce: " not in output


def other_packages(folder, condition, name, text=""):
    """Return a PYTHONPATH that has, where a condition holds, a package of another version."""
    package = folder / "other" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    hook = folder / "hook"
    hook.mkdir()
    path = str(folder / "other")
    (hook / "sitecustomize.py").write_text(
        f"import os, socket, sys\nif {condition}:\n    sys.path.insert(0, {path!r})\n"
    )
    return str(hook)


def test_a_port_in_use_gets_one_sentence(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        env = {"MASTER_PORT": str(port)}
        status, output = run(DOCTOR, "--local", "2", cwd=tmp_path, env=env)
    assert status == 1
    sentence = f"port {port} on imitated node 0: Address already in use. "
    assert failures(output)["meeting point"].startswith(sentence + "Choose another: export")


def test_outside_an_allocation_one_is_told_how_to_get_one(tmp_path):
    env = {name: "" for name in os.environ if name.startswith("SLURM_")}
    status, output = run(DOCTOR, cwd=tmp_path, env=env, timeout=10)
    assert status == 1
    assert output.startswith("This is not inside a Slurm allocation. Get one:\n  salloc --nodes 2")


@pytest.mark.parametrize("arguments", [("--no-such-option",), ("--local",), ("--local", "0")])
def test_a_wrong_option_gets_one_sentence(arguments, tmp_path):
    status, output = run(DOCTOR, *arguments, cwd=tmp_path, timeout=10)
    assert status == 1
    assert len(output.splitlines()) == 1


def test_help_says_how_to_use_it(tmp_path):
    status, output = run(DOCTOR, "--help", cwd=tmp_path, timeout=10)
    assert status == 0
    assert "Usage: scripts/doctor.sh" in output


# The checks, with facts of two nodes that are made up.


def facts_of(rank, **changes):
    """Return the facts of a rank of two, on nodes of their own where all is well."""
    versions = {"Python": "3.11.7", "torch": "2.15.0", "torchvision": "0.29.2"}
    return {
        "versions": {**versions, **dict.fromkeys(facts.OTHERS, "1.0")},
        "rank": rank,
        "local_rank": 0,
        "node": f"node{rank + 1}",
        "host": f"node{rank + 1}",
        "gpus": [f"GPU-{rank}-{i}" for i in range(4)],
        "backend": "nccl",
        "built": True,
        "has_gpus": True,
        "hidden": False,
        "interface": "eth0",
        "addresses": [f"10.0.0.{rank}"],
        "interfaces": ["lo", "eth0"],
        "cpus": list(range(8)),
        "cpus_of_node": 16,
        "cpus_asked": 8,
        "threads": 8,
        "shm": 2**30,
        "infiniband": True,
        "lockable": resource.RLIM_INFINITY,
        "damaged": [],
        "h5": True,
        "folder": "/home/me",
        "token": "abc",
        **changes,
    }


@pytest.mark.parametrize("name", checks.CHECKS)
def test_a_check_is_ok_where_all_is_well(name):
    fine, problem = checks.CHECKS[name]([facts_of(0), facts_of(1)])
    assert fine
    assert not problem


OLD = {**facts_of(1)["versions"], "Python": "3.10.1", "torch": "2.5.1", "tqdm": "0.9"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Python", {"versions": OLD}, "3.10.1 on node2. Version 3.11 or newer is needed"),
        ("torch", {"versions": OLD}, "2.5.1 on node2. Version 2.6 or newer is needed"),
        ("other packages", {"versions": OLD}, "tqdm 1.0 on node1; 0.9 on node2. Use one"),
        ("GPUs", {"gpus": []}, "torch sees none on node2, which has some. Ask for them"),
        (
            "GPUs",
            {"gpus": [], "built": False},
            "torch 2.15.0 on node2 is for CPUs only, and there are GPUs. Install torch and",
        ),
        ("GPUs", {"gpus": ["a", "b"]}, "4 on node1; 2 on node2. Ask for as many"),
        (
            "GPUs",
            {"node": "node1", "gpus": facts_of(0)["gpus"]},
            "ranks 0, 1 on node1 use only GPU-0-0",
        ),
        ("interface", {"addresses": [""]}, "eth0 has no address on node2. Choose one"),
        ("interface", {"addresses": ["127.0.0.1"]}, "does not lead to other nodes on node2"),
        ("CPUs", {"cpus": [0], "threads": 1}, "1 for rank 1 on node2, although it asked for 8"),
        ("CPUs", {"threads": 9}, "8 for 1 ranks with 9 threads in all on node2"),
        ("shared files", {"token": None}, "is not seen on node2. Go to a folder on"),
        ("data", {"damaged": ["x-ubyte"]}, "x-ubyte missing or damaged on node2. Restore it"),
        ("/dev/shm", {"shm": 2**20}, "1 MB free on node2, 32 are wanted"),
        (
            "locked memory",
            {"lockable": 2**23},
            "only 8 MB on node2, too little for InfiniBand. Ask",
        ),
    ],
)
def test_a_check_names_the_node_and_what_to_do(name, changes, words):
    _, problem = checks.CHECKS[name]([facts_of(0), facts_of(1, **changes)])
    assert words in problem


def test_gloo_is_named_where_each_rank_has_a_gpu_of_its_own():
    """Slurm shows each task one GPU, and does not say how many the node has."""
    ranks = [facts_of(rank, node="node1", gpus=[f"GPU-{rank}"]) for rank in (0, 1)]
    assert checks.check_gpus(ranks) == ("2 on each node, a different one for each rank", "")
    for rank in ranks:
        rank["backend"] = "gloo"
    problem = checks.check_gpus(ranks)[1]
    assert problem.startswith(
        "each of ranks 0, 1 on node1 has its own, but they would talk through"
    )
    assert problem.endswith(" how many GPUs there are. export SLURM_GPUS_ON_NODE=2")
    # Each sees all: so it is this torch that has no backend for them, as Intel's before 2.8.
    for rank in ranks:
        rank |= {"gpus": ["a", "b"], "local_rank": rank["rank"]}
    assert "this torch has nothing else for them" in checks.check_gpus(ranks)[1]


def test_gpus_that_a_variable_hides_are_no_fault():
    ranks = [facts_of(rank, gpus=[], backend="", hidden=True) for rank in (0, 1)]
    assert checks.check_gpus(ranks) == ("none, the ranks use the CPU", "")


@pytest.mark.parametrize(
    "changes", [{"infiniband": False}, {"gpus": []}, {"host": "node1"}, {"lockable": 2**40}]
)
def test_locked_memory_matters_for_gpus_and_infiniband_between_nodes(changes):
    low = {"lockable": 2**16, **changes}
    fine, problem = checks.check_lockable([facts_of(0), facts_of(1, **low)])
    assert (bool(fine), problem) == (True, "")


@pytest.mark.parametrize(
    ("kind", "hidden", "ids"),
    [
        ("cuda", {}, ["5ad10000", "5ad10001"]),
        ("hip", {"HIP_VISIBLE_DEVICES": "1"}, ["5ad10001"]),
        ("xpu", {"ZE_AFFINITY_MASK": "1,0"}, ["5ad10001", "5ad10000"]),
        ("none", {}, []),
    ],
)
def test_the_gpus_of_each_maker_are_seen(kind, hidden, ids, monkeypatch):
    """tests/standin answers for the GPUs."""
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"STANDIN_KIND": kind, "STANDIN_GPUS": "2", **hidden}.items():
        monkeypatch.setenv(name, value)
    torch = types.ModuleType("torch")
    torch.device = lambda name: types.SimpleNamespace(type=name)
    for name in ("accelerator", "cuda", "xpu", "version"):
        setattr(torch, name, types.ModuleType(name))
    torch.version.cuda = torch.version.hip = None
    torch.get_device_module = lambda kind: getattr(torch, kind)
    load(ROOT / "tests" / "standin" / "sitecustomize.py").stand_in(torch)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [gpu[:8] for gpu in facts.find_gpus()] == ids


def test_a_folder_without_write_permission_is_named():
    _, problem = checks.check_files([facts_of(0, token=None), facts_of(1, token=None)])
    assert problem.startswith("rank 0 cannot write in /home/me. ")


def test_ranks_may_share_a_gpu():
    shared = {"node": "node1", "gpus": ["GPU-0"]}
    fine, problem = checks.check_gpus([facts_of(0, **shared), facts_of(1, **shared)])
    assert fine == "1 on each node, shared by 2 ranks through gloo: slow"
    assert not problem


def test_nodes_may_have_unequal_numbers_of_gpus_if_each_rank_has_one():
    ranks = [facts_of(0, gpus=["a", "b"]), facts_of(1, gpus=["a", "b"]), facts_of(2, gpus=["a"])]
    ranks[1] |= {"node": "node1", "local_rank": 1}
    ranks[2] |= {"node": "node2"}
    fine, problem = checks.check_gpus(ranks)
    assert fine == "2 on node1; 1 on node2, a different one for each rank"
    assert not problem
    ranks[2]["gpus"] = ["a", "b"]  # as many on each node: it does not matter how many are used
    assert checks.check_gpus(ranks) == ("2 on each node, a different one for each rank", "")
    ranks[2]["gpus"] = ["a", "b", "c"]
    assert "2 on node1; 3 on node2. Ask for as many" in checks.check_gpus(ranks)[1]


def test_ranks_that_do_not_come_are_looked_for_on_their_nodes(tmp_path, monkeypatch):
    """Three nodes with 3, 2 and 2 ranks. The names are made up, so scontrol is too."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node1\necho node2\necho node3\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "3,2(x2)")
    monkeypatch.setattr(checks, "WORLD_SIZE", 7)
    came = [facts_of(rank) for rank in range(7) if rank not in (2, 5)]
    _, problem = checks.check_meeting({x["rank"]: "?" for x in came}, came)
    assert problem.startswith("rank 2, 5 (node1, node3) did not come in 15 s. ")


def test_a_node_that_takes_the_first_for_itself_is_told():
    text = doctor.why_not(["127.0.1.1"], ConnectionRefusedError(111, "Connection refused"))
    assert "is 127.0.1.1 here" in text
    assert text.endswith("That is this node itself: correct its /etc/hosts")


# Nodes of a real Slurm.


@pytest.fixture(scope="module")
def cluster():
    """A Slurm cluster of two nodes, in which a test may plant a fault."""
    slurm = bring_up(2, Path(f"/run/doctor-test-{os.getpid()}"))

    def on_nodes(*command, cwd, **variables):
        """Run a command in an allocation of both nodes; return (exit status, output)."""
        settings = [f"{name}={value}" for name, value in variables.items()]
        return run(
            LOCAL_SLURM, "shell", "env", *settings, *SALLOC, *command, cwd=cwd, env=slurm.env
        )

    def inside(node, *command):
        """Run a command with the network and the files of one node."""
        pid = (slurm.folder / f"node{node}.pid").read_text().strip()
        namespaces = ["--net", "--mount", f"--pid=/proc/{pid}/ns/pid_for_children"]
        command = ["nsenter", "--target", pid, *namespaces, *command]
        subprocess.run(command, check=True, timeout=10)

    @contextlib.contextmanager
    def unknown_to_node2(name, folder):
        """For a while, node 2 has another /etc/hosts: without that name."""
        lines = (slurm.folder / "hosts").read_text().splitlines()
        hosts = folder / "hosts"
        hosts.write_text("".join(line + "\n" for line in lines if name not in line))
        inside(2, "mount", "--bind", hosts, "/etc/hosts")
        try:
            yield
        finally:
            inside(2, "umount", "/etc/hosts")

    try:
        yield types.SimpleNamespace(
            on_nodes=on_nodes, inside=inside, unknown_to_node2=unknown_to_node2
        )
    finally:
        slurm.call("down")
    assert not slurm.folder.exists()


def test_all_is_well_on_the_nodes_of_a_cluster(cluster, tmp_path):
    status, output = cluster.on_nodes(DOCTOR, cwd=tmp_path)
    assert is_well(status, output, ranks=2), output
    assert re.search(r"^ok   meeting point: 2 ranks reached node1:\d+$", output, re.M)
    assert "ok   interface: eth0, with an address on every node\n" in output


def test_a_name_that_a_node_cannot_resolve_is_found(cluster, tmp_path):
    """The launcher would take Slurm's address instead, so here the ranks start without it."""
    start = (
        "RANK=$SLURM_PROCID WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=$0 GLOO_SOCKET_IFNAME=eth0 "
        'exec "$@"'
    )
    python = [sys.executable, "-u", ROOT / "scripts" / "doctor.py"]
    with cluster.unknown_to_node2("node1", tmp_path):
        _, output = cluster.on_nodes("srun", "sh", "-c", start, PORT, *python, cwd=tmp_path)
    assert re.search(
        r"^rank 1 on node2: the name node1 cannot be resolved \(.+\)\. Compare /etc/hosts ",
        output,
        re.M,
    ), output
    found = failures(output)
    assert set(found) == {"meeting point"}, output
    assert found["meeting point"].startswith("rank 1 (node2) did not come in 15 s. ")
    assert output.endswith("=> not ready: 1 of 13 checks failed\n")


def test_a_blocked_port_is_found(cluster, tmp_path):
    # What node 1 answers from this port is dropped, as a firewall does it.
    rule = f"to 10.77.0.2 ipproto tcp sport {PORT} blackhole".split()
    cluster.inside(1, "ip", "rule", "add", *rule)
    try:
        began = time.monotonic()
        status, output = cluster.on_nodes(DOCTOR, cwd=tmp_path, MASTER_PORT=PORT)
        seconds = time.monotonic() - began
    finally:
        cluster.inside(1, "ip", "rule", "delete", *rule)
    assert status == 1
    text = rf"node1 is 10\.77\.0\.1 here, and port {PORT} there cannot be reached \(timed out\)"
    assert re.search(rf"^rank 1 on node2: {text}\. Look at the firewall ", output, re.M), output
    found = failures(output)
    assert set(found) == {"meeting point"}, output
    assert found["meeting point"].startswith("rank 1 (node2) did not come in 15 s. ")
    assert seconds < 45


def test_versions_that_differ_are_found(cluster, tmp_path):
    path = other_packages(
        tmp_path, 'socket.gethostname() == "node2"', "torch", '__version__ = "2.7.0"\n'
    )
    status, output = cluster.on_nodes(DOCTOR, cwd=tmp_path, PYTHONPATH=path)
    assert status == 1
    found = failures(output)
    assert re.match(r"\d+\.\S+ on node1; 2\.7\.0 on node2\. Use one environment", found["torch"]), (
        output
    )
    assert "not usable" in found["torchvision"]  # with that torch
    assert {"meeting point", "GPUs"}.isdisjoint(found)
