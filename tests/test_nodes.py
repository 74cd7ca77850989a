"""Lessons on several nodes: imitated ones, and those of a real Slurm."""

import os
import re
import shlex
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import bring_up
from helpers import (
    LAUNCHER,
    LESSONS,
    ROOT,
    cannot,
    launch,
    once,
    proof_of,
    proves,
    wait_for,
)
from ranks import run_ranks

FEW = ("--max-steps", 20)
# Word for word what day2/README.md tells people to type, the account apart.
SALLOC = shlex.split(
    "salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=abc_g"
)


def places(output):
    """Return lesson 9's rows: [(rank, host, local rank), ...]."""
    rows = re.findall(r"^rank (\d+) of \d+ on (\S+), local rank (\d+), ", output, re.M)
    return [(int(rank), host, int(local)) for rank, host, local in rows]


def losses_of(output):
    """Return lesson 8's and 10's mean losses, in the order of the rows."""
    return [float(loss) for loss in re.findall(r"mean loss ([\d.]+)$", output, re.M)]


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory):
    """The losses of lesson 8 with four processes."""

    def run():
        return run_ranks(4, ROOT / LESSONS["8"]["file"], *FEW, cwd=tmp_path_factory.mktemp("one"))

    status, output = once(tmp_path_factory, "lesson_8", run)
    assert status == 0, output
    return losses_of(output)


# Imitated nodes.


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


def test_lesson_10_on_imitated_nodes_has_the_losses_of_one_node(on_one_node, tmp_path):
    status, output = launch("--local", "2x2", 10, *FEW, cwd=tmp_path)
    assert status == 0, output
    assert proves("10", output)
    assert losses_of(output) == pytest.approx(on_one_node, abs=2e-4)
    assert (tmp_path / "runs" / "10_mnist_ddp_pt_multinode" / "loss.png").exists()


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


def test_the_salloc_line_and_lesson_9(slurm, tmp_path):
    done = slurm.run(*SALLOC, LAUNCHER, "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == [(r, f"node{r // 4 + 1}", r % 4) for r in range(8)]
    assert proof_of(done.stdout).startswith("=> 2 nodes, 8 ranks: every rank holds the sum")
    first, second, third = done.stdout.splitlines()[:3]
    assert first == "nodes: node1 node2, ranks on each: 4, in all: 8"
    assert re.fullmatch(r"meeting point: node1:\d+, interface eth0", second)
    assert third.startswith("each rank: 32 CPUs, ")


def test_lesson_10_on_two_nodes_has_the_losses_of_one(slurm, on_one_node, tmp_path):
    done = slurm.run(
        "salloc", "--nodes", 2, "--ntasks-per-node", 2, LAUNCHER, "10", *FEW, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert proves("10", done.stdout)
    assert losses_of(done.stdout) == pytest.approx(on_one_node, abs=2e-4)


def test_torchrun_on_two_nodes(slurm, on_one_node, tmp_path):
    command = ("salloc", "--nodes", 2, "--ntasks-per-node", 2, LAUNCHER, "--torchrun")
    done = slurm.run(*command, "10", *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses_of(done.stdout) == pytest.approx(on_one_node, abs=2e-4)


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


def test_lesson_11_by_sbatch_writes_to_logs(slurm, tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    file = folder / "mnist.h5"
    create = ROOT / LESSONS["create_mnist_h5"]["file"]
    assert run_ranks(1, create, "--file", file, cwd=folder)[0] == 0
    script = ROOT / "scripts" / "sbatch_run.sh"
    few = ("--epochs", 1, "--max-steps", 5, "--file", file)
    done = slurm.run("sbatch", "--wait", "-N", 2, script, "11", *few, cwd=folder)
    (log,) = folder.glob("logs/slurm-*.out")
    output = log.read_text()
    assert done.returncode == 0, output
    assert output.startswith("nodes: node1 node2, ranks on each: 1, in all: 2")
    assert proves("11", output)
    monitors = sorted(folder.glob("logs/cpu-*.out"))
    assert len(monitors) == 2
    for node, file in enumerate(monitors, 1):
        assert file.name == f"cpu-{log.stem.removeprefix('slurm-')}.1-node{node}.out"
        check_monitor(file)


def test_three_nodes(tmp_path):
    if os.geteuid():
        cannot("needs root")
    cluster = bring_up(3, f"/run/local-slurm-three-{os.getpid()}")
    try:
        done = cluster.run("salloc", "--nodes", 3, LAUNCHER, "9", cwd=tmp_path)
    finally:
        cluster.call("down")
    assert done.returncode == 0, done.stderr
    assert [host for _, host, _ in places(done.stdout)] == ["node1", "node2", "node3"]


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
        assert "=> 2 nodes, 2 ranks: every rank holds the sum 0+1 = 1" in done.stdout
    assert len({re.search(r"node1:(\d+)", done.stdout)[1] for done in results}) == 2


def all_commands():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (("--nodes", 2, "--gpus-per-node", 4, "--cpus-per-task", 8), 8),
        (("--nodes", 2, "--gpus", 4), 4),
        (("--nodes", 2), 2),
        (("--nodes", 1, "--ntasks-per-node", 3), 3),
        (("--nodes", 1, "--ntasks-per-node", 4, "--gpus-per-task", 1), 4),
    ],
)
def test_launcher_starts_as_many_ranks_as_the_allocation_has_gpus_or_tasks(
    options, ranks, slurm, tmp_path
):
    done = slurm.run("salloc", *options, LAUNCHER, "--dry-run", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"in all: {ranks}\n" in done.stdout
    assert f"--ntasks={ranks} " in done.stdout


def test_a_cluster_leaves_nothing_behind(tmp_path):
    if os.geteuid():
        cannot("needs root")

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
