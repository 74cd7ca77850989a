"""The launcher: on imitated nodes, and on those of a real Slurm."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from itertools import groupby
from pathlib import Path

import pytest
from clusters import LOCAL_SLURM, bring_up, need_slurm
from helpers import (
    LAUNCHER,
    LESSONS,
    ROOT,
    launch,
    need,
    proves,
    wait_for,
)
from ranks import run_ranks

# Imitated nodes.


def check_monitor(file):
    """Assert that a file holds what vmstat notes: its two lines of names, then one a second."""
    _, names, *rows = file.read_text().splitlines()
    assert " us sy id " in names
    assert rows
    assert all(re.search(r" \d\d:\d\d:\d\d$", row) for row in rows), rows


def processes_in(folder):
    """Return the ids of the processes that work in a folder."""
    return [
        x.parent.name
        for x in Path("/proc").glob("[0-9]*/cwd")
        if os.path.realpath(x) == str(folder)
    ]


@pytest.mark.parametrize("tool", ["", "nvidia-smi", "rocm-smi", "xpu-smi"])
def test_monitor_notes_how_busy_each_node_is(tool, tmp_path):
    need("vmstat")
    lesson = tmp_path / "wait.py"
    lesson.write_text("import time\ntime.sleep(2.5)\n")
    # There are no GPUs here: something in the place of their makers' tools.
    if tool:
        seconds = 0 if tool == "rocm-smi" else 60  # the others go on until they are ended
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$@"\nexec sleep {seconds}\n')
        (tmp_path / tool).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    status, output = launch("--local", "2x2", "--monitor", lesson, cwd=tmp_path, env=env)
    assert status == 0, output
    cpu, gpu = (sorted(tmp_path.glob(f"logs/{kind}-*.out")) for kind in ("cpu", "gpu"))
    assert len(cpu) == 2
    for node, file in enumerate(cpu):
        assert file.name.endswith(f"-imitated-node-{node}.out")
        check_monitor(file)
    assert len(gpu) == (2 if tool else 0)
    expected = {"nvidia-smi": "utilization.gpu", "rocm-smi": "--showuse", "xpu-smi": "dump"}
    for file in gpu:
        assert expected[tool] in file.read_text()
    assert wait_for(lambda: not processes_in(tmp_path), 5), "the monitors are left behind"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Which lesson?"),
        (("--local", "2x", "9"), "--local wants N or NxM"),
        (("--local", "0", "9"), "--local wants N or NxM"),
        (("--locale", "9"), "There is no option --locale"),
        (("--local", "1", "99"), "There is no lesson and no file '99'"),
        (("--local", "1", "nothing.py"), "There is no lesson and no file 'nothing.py'"),
    ],
)
def test_launcher_refuses_with_a_sentence(arguments, sentence, tmp_path):
    status, output = launch(*arguments, cwd=tmp_path)
    assert status == 1
    assert len(output.splitlines()) == 1
    assert output.startswith(sentence)


@pytest.mark.parametrize(
    "name", ["9", "9_torch_dist_multi_node.py", "day2/9_torch_dist_multi_node"]
)
def test_launcher_finds_a_lesson_by_number_name_or_path(name, tmp_path):
    path = ROOT / f"{name}.py" if name.startswith("day2/") else name
    status, output = launch("--local", "2", "--dry-run", path, "a b", cwd=tmp_path)
    assert status == 0
    assert output.splitlines()[-1].endswith(r"day2/9_torch_dist_multi_node.py a\ b ")


# A real Slurm.


def test_lesson_11_by_sbatch_writes_to_logs(slurm, tmp_path):
    need("vmstat")
    folder = tmp_path / "with space"
    folder.mkdir()
    file = folder / "mnist.h5"
    create = ROOT / LESSONS["create_mnist_h5"]["file"]
    assert run_ranks(1, create, "--file", file, cwd=folder)[0] == 0
    script = ROOT / "scripts" / "sbatch_run.sh"
    few = ("--epochs", 1, "--max-steps", 5, "--file", file)
    done = slurm.run("sbatch", "--wait", "--ntasks-per-node=1", script, "11", *few, cwd=folder)
    (log,) = folder.glob("logs/slurm-*.out")
    output = log.read_text()
    assert done.returncode == 0, output
    assert "\nnodes: node1 node2, ranks on each: 1, in all: 2\n" in output
    assert proves(output)
    monitors = sorted(folder.glob("logs/cpu-*.out"))
    assert len(monitors) == 2
    for node, file in enumerate(monitors, 1):
        assert file.name == f"cpu-{log.stem.removeprefix('slurm-')}.1-node{node}.out"
        check_monitor(file)


def test_two_jobs_at_the_same_time_do_not_meet(slurm, tmp_path):
    results = []
    jobs = [
        threading.Thread(
            target=lambda: results.append(
                slurm.run("salloc", "--nodes", 2, "--mem", "1G", LAUNCHER, "9", cwd=tmp_path)
            )
        )
        for _ in range(2)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for done in results:
        assert done.returncode == 0, done.stderr
        assert "=> 2 nodes, 2 ranks: every rank holds 1; the sum 0+1 is 1: ok" in done.stdout
    assert len({re.search(r"node1:(\d+)", done.stdout)[1] for done in results}) == 2


def all_commands():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


# As many ranks as tasks were asked for.

# Prints some of its variables in one short piece: longer lines of several ranks may mix.
SHOW = """import json, os, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR GPUS_ON_NODE".split()
names += "SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU".split()
names += "SLURM_NTASKS_PER_GPU SLURM_EXACT SLURM_HINT SLURM_DISTRIBUTION".split()
names += "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
found = {name: os.environ.get(name) for name in names} | {"HOST": socket.gethostname()}
os.write(1, (json.dumps(found) + "\\n").encode())
"""


@pytest.fixture
def show(tmp_path):
    """A script that prints the variables of a rank."""
    file = tmp_path / "show.py"
    file.write_text(SHOW)
    return file


def check_ranks(output, total):
    """Assert that there are so many ranks, those of a node in a row, and that each is told so.

    Return the variables of each rank, and how many ranks each node has.
    """
    ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    ranks.sort(key=lambda rank: int(rank["RANK"]))
    assert [rank["RANK"] for rank in ranks] == [str(number) for number in range(total)], output
    assert {rank["WORLD_SIZE"] for rank in ranks} == {str(total)}
    nodes = [[*group] for _, group in groupby(ranks, lambda rank: rank["HOST"])]
    assert len(nodes) == len({rank["HOST"] for rank in ranks})
    for node in nodes:
        assert [rank["LOCAL_RANK"] for rank in node] == [str(number) for number in range(len(node))]
        assert {rank["LOCAL_WORLD_SIZE"] for rank in node} == {str(len(node))}
    counts = [len(node) for node in nodes]
    each = " ".join(map(str, counts if len({*counts}) > 1 else counts[:1]))
    assert f"ranks on each: {each}, in all: {total}\n" in output.replace("\r", "")
    return ranks, counts


@pytest.mark.parametrize(
    ("options", "total", "counts"),
    [
        ("-n 3", 3, [3]),
        ("-N 2 -n 4", 4, None),  # on nodes that others use too, Slurm shares them out as it likes
        ("-N 2 -n 8 --cpus-per-task 2", 8, None),
        ("-N 2 -n 5 --exclusive", 5, [3, 2]),
        ("-N 2 -n 5 --exclusive --distribution cyclic", 5, [3, 2]),
        ("-N 2 -n 5 --gpus-per-task 1", 5, None),
        ("-N 2 --ntasks-per-node 2 --distribution cyclic", 4, [2, 2]),
        ("-N 1 --ntasks-per-node 4 --gpus-per-task 1", 4, [4]),
        ("-N 2 --gpus 8 --ntasks-per-gpu 1", 8, [4, 4]),
        ("-N 2 --gpus-per-node 4 --cpus-per-task 8", 8, [4, 4]),
        ("-N 2 --gpus 4", 4, None),
        ("-N 2", 2, [1, 1]),
    ],
)
def test_as_many_ranks_as_tasks_else_as_gpus_else_as_nodes(
    options, total, counts, slurm, show, tmp_path
):
    both = 'LAUNCHER=$0; "$LAUNCHER" --dry-run show.py && "$LAUNCHER" show.py'
    command = ("salloc", *options.split(), "sh", "-c", both, LAUNCHER)
    done = slurm.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks, found = check_ranks(done.stdout, total)
    assert found == (counts or found)
    if "--gpus " in options:
        assert all(rank["GPUS_ON_NODE"] == rank["LOCAL_WORLD_SIZE"] for rank in ranks)
    # --dry-run says the same, and then what it would start.
    lines = [re.sub(r":\d+,", ",", line) for line in done.stdout.splitlines()]
    assert lines[:3] == lines[4:7]
    assert lines[3].startswith("srun ")
    assert f" --ntasks={total} " in lines[3]


@pytest.mark.parametrize(("options", "total"), [("-N 2 -n 5 --exclusive", 5), ("-N 2 -n 4", 4)])
def test_each_torchrun_starts_as_many_ranks_as_its_node_has_tasks(
    options, total, slurm, show, tmp_path
):
    command = ("salloc", *options.split(), LAUNCHER, "--torchrun", show)
    done = slurm.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_ranks(done.stdout, total)


def test_torchrun_wants_all_gpus_of_a_node(slurm, tmp_path):
    allocation = ("salloc", "--quiet", "-N", 2, "-n", 4, "--gpus-per-task", 1)
    done = slurm.run(*allocation, LAUNCHER, "--torchrun", "9", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("With --torchrun a node has one task, and --gpus-per-task gives")
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    # One rank a node may have all of the node's GPUs that way.
    allocation = ("salloc", "--quiet", "-N", 2, "-n", 2, "--gpus-per-task", 2)
    done = slurm.run(*allocation, LAUNCHER, "--torchrun", "--dry-run", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_doctor_where_the_nodes_have_unequal_numbers_of_ranks(slurm, tmp_path):
    doctor = ROOT / "scripts" / "doctor.sh"
    done = slurm.run("salloc", "-N", 2, "-n", 3, "--exclusive", doctor, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("nodes: node1 node2, ranks on each: 2 1, in all: 3\n")
    assert done.stdout.endswith(" checks ok, 3 ranks\n")


# What salloc, the site or the user may have left in the environment.


@pytest.mark.parametrize(
    "planted",
    [
        "SRUN_CPUS_PER_TASK=32",
        "SLURM_TRES_PER_TASK=cpu:32",
        "SLURM_CPUS_PER_GPU=2",
        "SLURM_NTASKS_PER_GPU=1",
        "SLURM_EXACT=1",
        "SLURM_HINT=nomultithread",
        "SLURM_DISTRIBUTION=cyclic",
        "SLURM_EXPORT_ENV=NONE",
    ],
)
def test_what_is_in_the_environment_does_not_disturb(planted, slurm, show, tmp_path):
    name, value = planted.split("=")
    allocation = ("salloc", "-N", 2, "--ntasks-per-node", 2, "-c", 4, "--gpus-per-node", 2)
    done = slurm.run(*allocation, "env", planted, LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\neach rank: 4 CPUs, " in done.stdout
    assert "support" not in done.stderr
    ranks, counts = check_ranks(done.stdout, 4)
    assert counts == [2, 2]
    assert {rank["SLURM_CPUS_PER_TASK"] for rank in ranks} == {"4"}
    if name != "SLURM_EXPORT_ENV":
        assert value not in {rank.get(name) for rank in ranks}


def test_the_address_of_the_user_is_used(slurm, show, tmp_path):
    allocation = ("salloc", "-N", 2, "env", "MASTER_ADDR=10.77.0.1")
    done = slurm.run(*allocation, LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^meeting point: 10\.77\.0\.1:\d+, interface eth0$", done.stdout, re.M)
    assert {rank["MASTER_ADDR"] for rank in check_ranks(done.stdout, 2)[0]} == {"10.77.0.1"}
    allocation = ("salloc", "--quiet", "-N", 2, "env", "MASTER_ADDR=127.0.0.1")
    done = slurm.run(*allocation, LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 1
    sentence = "MASTER_ADDR is 127.0.0.1, where each node finds only itself: unset MASTER_ADDR\n"
    assert done.stderr == sentence


def test_where_no_interface_is_found_all_else_is_right(slurm, show, tmp_path):
    ip = tmp_path / "bin" / "ip"
    ip.parent.mkdir()
    ip.write_text("#!/bin/sh\nexit 1\n")
    ip.chmod(0o755)
    path = f"PATH={ip.parent}:{os.environ['PATH']}"
    allocation = ("salloc", "-N", 2, "-c", 4, "--gpus-per-node", 2, "env", path)
    done = slurm.run(*allocation, LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^meeting point: node1:\d+, interface -\neach rank: 2 CPUs, ", done.stdout, re.M
    )
    assert check_ranks(done.stdout, 4)[1] == [2, 2]


@pytest.fixture
def inside(slurm):
    """A function that runs a command with the network and the files of a node, or of login."""

    def run(name, *command):
        pid = (Path(slurm.folder) / f"{name}.pid").read_text().strip()
        namespaces = ["--net", "--mount", f"--pid=/proc/{pid}/ns/pid_for_children"]
        enter = ["nsenter", "--target", pid, *namespaces]
        subprocess.run([*enter, *map(str, command)], check=True, timeout=10)

    return run


@pytest.fixture
def fast_network(slurm, inside):
    """Each node has a second card, hsn0, which its name does not lead to: node 1 is 10.78.0.1."""
    made, login = [], Path(slurm.folder) / "login.net"
    inside("login", "ip", "link", "add", "fast", "type", "bridge")
    try:
        inside("login", "ip", "link", "set", "fast", "up")
        for number in (1, 2):
            pair = ["type", "veth", "peer", "name", f"hsn{number}", "netns", login]
            inside(f"node{number}", "ip", "link", "add", "hsn0", *pair)
            made.append(f"node{number}")
            inside("login", "ip", "link", "set", f"hsn{number}", "master", "fast", "up")
            inside(made[-1], "ip", "address", "add", f"10.78.0.{number}/24", "dev", "hsn0")
            inside(made[-1], "ip", "link", "set", "hsn0", "up")
        yield
    finally:
        for node in made:
            inside(node, "ip", "link", "delete", "hsn0")
        inside("login", "ip", "link", "delete", "fast")


@pytest.mark.usefixtures("fast_network")
def test_the_ranks_meet_in_the_fast_network_though_names_lead_elsewhere(slurm, show, tmp_path):
    """A rank of srun is told so; of torchrun, it has met the others there."""
    both = '"$0" show.py && "$0" --torchrun show.py'
    allocation = ("salloc", "-N", 2, "--ntasks-per-node", 1, "sh", "-c", both)
    done = slurm.run(*allocation, LAUNCHER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    point = r"^meeting point: 10\.78\.0\.1:\d+, interface hsn0$"
    assert len(re.findall(point, done.stdout, re.M)) == 2
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(ranks) == 4
    for rank in ranks:
        assert (rank["GLOO_SOCKET_IFNAME"], rank["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn")
        assert rank["MASTER_ADDR"] in ("10.78.0.1", "10.78.0.2")  # any node's, with torchrun
    assert {rank["MASTER_ADDR"] for rank in ranks[:2]} == {"10.78.0.1"}


def test_a_node_that_takes_its_name_for_itself_is_met_at_its_address(slurm, inside, show, tmp_path):
    """As Debian writes it into /etc/hosts."""
    hosts = tmp_path / "hosts"
    lines = (Path(slurm.folder) / "hosts").read_text()
    hosts.write_text(re.sub(r"^\S+ node1$", "127.0.1.1 node1", lines, flags=re.M))
    inside("node1", "mount", "--bind", hosts, "/etc/hosts")
    try:
        done = slurm.run("salloc", "-N", 2, LAUNCHER, show, cwd=tmp_path)
    finally:
        inside("node1", "umount", "/etc/hosts")
    assert done.returncode == 0, done.stderr
    ranks, _ = check_ranks(done.stdout, 2)
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"10.77.0.1"}


# What the page day2/SITES.md shows, and in the place of Apptainer what starts no container.
APPTAINER = """#!/bin/sh
test "$1 $2 $3 $4 $5 $6" = "exec --nv --bind COURSE IMAGE python3" || {
  echo "not understood: $*" >&2
  exit 1
}
shift 6
IN_CONTAINER=yes exec PYTHON "$@"
"""
ARGUMENTS = """import json, os, sys
os.write(1, (json.dumps([os.environ.get("IN_CONTAINER"), *sys.argv[1:]]) + "\\n").encode())
"""


@pytest.fixture
def container(tmp_path):
    """The settings PYTHON and PATH of a container, in a folder whose name has a space."""
    page = (ROOT / "day2" / "SITES.md").read_text()
    (text,) = re.findall(r"^```sh\n(#!/bin/sh\nexec apptainer .*?)^```$", page, re.M | re.S)
    words = {"<folder of the course>": "COURSE", "<image>.sif": "IMAGE"}
    folder = tmp_path / "in a container"
    folder.mkdir()
    for word, instead in words.items():
        text = text.replace(word, instead)
    (folder / "python.sh").write_text(text)
    (folder / "apptainer").write_text(APPTAINER.replace("PYTHON", sys.executable))
    for file in folder.iterdir():
        file.chmod(0o755)
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    return {"PYTHON": f"{folder}/python.sh", "PATH": f"{folder}:{os.environ['PATH']}"}


SAID = ["yes", "a b", "", "--", "-x", "$HOME"]


def test_python_may_be_a_script_that_starts_a_container(container, tmp_path):
    words = ("--local", "2", "arguments.py", *SAID[1:])
    status, output = launch(*words, cwd=tmp_path, env=container)
    assert status == 0, output
    assert f"threads of {container['PYTHON']}, on " in output
    said = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert said == [SAID] * 2


def test_python_may_be_such_a_script_on_the_nodes_of_a_cluster(container, slurm, tmp_path):
    settings = [f"{name}={value}" for name, value in container.items()]
    command = ("salloc", "-N", 2, "env", *settings, LAUNCHER, "arguments.py", *SAID[1:])
    done = slurm.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f", {container['PYTHON']}, started by " in done.stdout
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert said == [SAID] * 2


def test_gpus_are_counted_where_slurm_only_lists_them(slurm, show, tmp_path):
    step = ("srun", "-N", 1, "--ntasks-per-node", 2, "--gpus-per-node", 3)
    done = slurm.run(*step, "env", "-u", "SLURM_GPUS_ON_NODE", LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [rank["GPUS_ON_NODE"] for rank in ranks] == ["3", "3"]


# A shell that Slurm opens on a node.


def typed(cluster, *command, line, cwd):
    """Type a line into the shell that a command opens, at a terminal. Return what the shell wrote.

    Only a shell with a terminal is one in which somebody types.
    """
    ours, theirs = pty.openpty()
    shell = ["setsid", "--ctty", "--wait", str(LOCAL_SLURM), "shell", *map(str, command)]
    env = {**cluster.env, "SHELL": "bash"}  # which salloc starts, and which cron does not set
    with subprocess.Popen(
        shell, env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.write(ours, f"{line} >typed.out 2>&1; exit\n".encode())
        ended = threading.Timer(100, process.kill)
        ended.start()
        said = b""
        try:
            while part := os.read(ours, 1000):
                said += part
        except OSError:  # the other side is closed
            pass
        ended.cancel()
    os.close(ours)
    file = cwd / "typed.out"
    return file.read_text() if file.exists() else said.decode()


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("-N 1 --gpus-per-node 4 -c 8", [4]),  # nobody asked for tasks
        ("-N 2 --ntasks-per-node 2 -c 2", [2, 2]),
    ],
)
def test_in_a_shell_of_srun_the_launcher_is_no_rank(options, counts, slurm, show, tmp_path):
    command = ("srun", *options.split(), "--pty", "bash", "--norc")
    python = shlex.quote(sys.executable)
    line = f"PYTHON={python} {shlex.quote(str(LAUNCHER))} show.py"
    output = typed(slurm, *command, line=line, cwd=tmp_path)
    assert check_ranks(output, sum(counts))[1] == counts


def test_threads_of_a_core_and_a_shell_on_the_first_node(show, tmp_path, monkeypatch):
    """The cores of this cluster have two threads, and salloc opens its shell on a node."""
    need_slurm()
    settings = "NodeName=DEFAULT Sockets=1 CoresPerSocket=64 ThreadsPerCore=2\n"
    settings += "LaunchParameters=use_interactive_step"
    monkeypatch.setenv("LOCAL_SLURM_SETTINGS", settings)
    cluster = bring_up(2, f"/run/local-slurm-threads-{os.getpid()}")
    try:
        allocation = ("salloc", "-N", 2, "--exclusive", "--hint", "nomultithread")
        done = cluster.run(*allocation, "-n", 5, LAUNCHER, show, cwd=tmp_path)
        python = shlex.quote(sys.executable)
        line = f"PYTHON={python} {shlex.quote(str(LAUNCHER))} show.py"
        output = typed(cluster, "salloc", "-N", 2, "-n", 4, "-c", 2, line=line, cwd=tmp_path)
    finally:
        cluster.call("down")
    assert done.returncode == 0, done.stderr
    assert "\neach rank: 21 CPUs, " in done.stdout  # 64 of 128, for three ranks
    assert check_ranks(done.stdout, 5)[1] == [3, 2]
    assert "\neach rank: 2 CPUs, " in output
    check_ranks(output, 4)


# An older bash.


@pytest.mark.parametrize("name", ["multinode_setup_and_run", "doctor", "local_slurm", "sbatch_run"])
def test_a_bash_that_is_too_old_gets_a_sentence(name):
    """Only the check can be run, with another version: one does not install an old bash."""
    before, _, after = (
        (ROOT / "scripts" / f"{name}.sh").read_text().partition("set -euo pipefail\n")
    )
    assert all(line[:1] in ("", "#") for line in before.splitlines())
    check = after[: after.index("\nfi\n") + 4].replace("BASH_VERSINFO", "version")
    for version, status in (("3 2", 1), ("4 3", 1), ("4 4", 0), ("5 2", 0)):
        done = subprocess.run(
            ["bash", "-c", f"version=({version})\n{check}"], capture_output=True, text=True
        )
        assert done.returncode == status
        assert done.stderr.startswith("bash 4.4 or newer is needed, ") == bool(status)


# What bash has learned since 4.4.
NEW_IN_BASH = r"EPOCH(REALTIME|SECONDS)|SRANDOM|BASH_ARGV0|GLOBSORT|\bwait -\w*[fp]|\bread -\w*E"
NEW_IN_BASH += (
    r"|\$\{ |\$\{[^}]*@[UuLKk]\}|\b(patsub_replacement|varredir_close|localvar_inherit)\b"
)


def test_no_script_needs_a_bash_newer_than_4_4():
    scripts = [*(ROOT / "scripts").glob("**/*.sh"), *(ROOT / "tests").glob("*.sh")]
    assert len(scripts) > 7
    for script in scripts:
        found = re.search(NEW_IN_BASH, script.read_text())
        assert not found, f"{script.name}: {found[0]}"


def test_a_job_that_slurm_starts_again_keeps_what_it_has_said(slurm, tmp_path):
    lesson = tmp_path / "wait.py"
    lesson.write_text(
        "import os, time\n"
        'print("starts:", 1 + int(os.environ.get("SLURM_RESTART_COUNT", 0)), flush=True)\n'
        'time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 100)\n'
    )
    script = ROOT / "scripts" / "sbatch_run.sh"
    few = ("-N", 1, "--ntasks-per-node=1")
    done = slurm.run("sbatch", "--parsable", *few, script, lesson, cwd=tmp_path)
    job = done.stdout.strip()
    log = tmp_path / "logs" / f"slurm-{job}.out"
    assert wait_for(lambda: log.exists() and "starts: 1" in log.read_text(), 60)
    assert slurm.run("scontrol", "requeue", job, cwd=tmp_path).returncode == 0
    assert wait_for(lambda: "starts: 2" in log.read_text(), 150), log.read_text()
    assert log.read_text().index("starts: 1") < log.read_text().index("starts: 2")
    (monitor,) = tmp_path.glob(f"logs/cpu-{job}.*.out")
    assert wait_for(lambda: monitor.read_text().count(" us sy id ") == 2, 10)


def test_a_cluster_leaves_nothing_behind(tmp_path):
    need_slurm()
    need("ps")

    def traces():
        mounts = Path("/proc/self/mounts").read_text()
        links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
        return folder in all_commands(), folder in mounts, links, os.path.exists(folder)

    folder = f"/run/local-slurm-short-{os.getpid()}"
    before = traces()
    cluster = bring_up(2, folder)
    assert "node2" in cluster.run("srun", "--nodes", 2, "hostname", cwd=tmp_path).stdout
    assert cluster.call("up").returncode == 1  # there is one already
    assert cluster.call("down").returncode == 0
    assert traces() == before
    assert cluster.call("status").returncode == 1
    assert cluster.call("down").returncode == 0  # nothing to do is no fault
