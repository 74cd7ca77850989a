"""What the launcher makes of Slurm's variables, and an srun that a real Slurm shows nowhere.

The variables stand in dictionaries here; tests/slurm/test_launcher_on_slurm.py has a real Slurm.
"""

import os
import re
import shlex
import subprocess
import sys

import processes
import pytest
from launcher import rank, rendezvous, slurm, srun_options
from support.run import BEGIN, FAST, LAUNCHER, ROOT, launch, wait_for, wait_without_trouble


def test_gpus_are_counted_where_slurm_only_lists_them():
    """As at Jülich."""
    assert srun_options.count_gpus({"SLURM_STEP_GPUS": "0,1", "SLURM_JOB_GPUS": "0,1,2"}) == 2


def test_nodes_with_unequal_cpus_get_their_ranks_by_name():
    given = {"SLURM_JOB_CPUS_PER_NODE": "8,4"}
    cpus, words = srun_options.options_of(["node1", "node2"], [2, 2], False, given)
    assert cpus == 2
    assert {"--nodelist=node1,node1,node2,node2", "--distribution=arbitrary"} <= set(words)


def test_torchrun_wants_all_gpus_of_a_node():
    given = {"SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1"}
    with pytest.raises(SystemExit, match="With --torchrun a node has one task, and --gpus-per-ta"):
        srun_options.options_of(["node1", "node2"], [2, 2], True, given)


# What Slurm and the launcher tell the last of three tasks, which is alone on its node.
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
TASK |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
TASK |= {"SLURM_NODEID": "1", "SLURM_CPUS_ON_NODE": "1", "SLURMD_NODENAME": "node2"}
TASK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANKS_PER_NODE": "2 1"}


@pytest.mark.parametrize(
    ("mask", "torchrun", "told"),
    [
        ("2", False, "4"),
        ("2", True, None),  # a torchrun gets them all
        ("0,1", False, None),  # a user's own mask
    ],
)
def test_a_rank_that_may_see_one_gpu_hears_how_many_its_node_has(mask, torchrun, told):
    given = {**TASK, "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": mask}
    assert rank.variables_of_rank(given, torchrun).get("GPUS_ON_NODE") == told


def test_sigterm_for_a_task_reaches_its_rank_and_nobody_has_failed(tmp_path):
    """With control groups Slurm signals only what it has started itself."""
    handler = "lambda *_: sys.exit(print('saved') or 3)"
    text = f"signal.signal(signal.SIGTERM, {handler})\nprint('ready')\ntime.sleep(60)\n"
    (tmp_path / "rank.py").write_text(BEGIN + text)
    command = [LAUNCHER, "--as-task", tmp_path / "rank.py"]
    options = {"cwd": tmp_path, "env": os.environ | TASK, "stderr": subprocess.PIPE, **FAST}
    with processes.Job(command, 60, **options) as job:
        assert wait_for(lambda: "ready" in job.output, 30)
        job.process.terminate()
        wait_without_trouble(job)
    assert (job.status, job.output, job.errors) == (3, "ready\nsaved\n", "")


@pytest.mark.parametrize(
    ("interfaces", "name_leads_to", "expected"),
    [
        ({"eth0": "10.0.0.1"}, "10.0.0.1", ("node1", "eth0")),
        # As on JUWELS: the name leads into another network than the fast one.
        ({"eth0": "10.0.0.1", "ib0": "10.9.0.1"}, "10.0.0.1", ("10.9.0.1", "ib0")),
        ({"ib0": "10.9.0.1", "hsn0": "10.8.0.1"}, "10.8.0.1", ("node1", "hsn0")),
        # As Debian writes it into /etc/hosts.
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1"}, "127.0.1.1", ("10.0.0.1", "eth0")),
        ({}, "10.0.0.1", ("node1", "")),  # none is found: gloo and NCCL choose themselves
    ],
)
def test_a_node_is_reached_through_its_fast_network(
    interfaces, name_leads_to, expected, monkeypatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous, "interfaces", lambda: interfaces)
    monkeypatch.setattr(rendezvous, "addresses_of", lambda name: [name_leads_to])
    assert rendezvous.address_and_interface("node1") == expected


@pytest.fixture
def fake_command(tmp_path, monkeypatch):
    """A function that writes a program into the first folder of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name, text):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    return write


# Starts no container.
APPTAINER = f"""#!/bin/sh
test "$1 $2 $3 $4 $5 $6" = "exec --nv --bind COURSE IMAGE python3" || exit 1
shift 6
IN_CONTAINER=yes exec {shlex.quote(sys.executable)} "$@"
"""


def test_python_may_be_the_script_of_the_page_that_starts_a_container(fake_command, tmp_path):
    page = (ROOT / "day2" / "SITES.md").read_text()
    script = re.search(r"^```sh\n(#!/bin/sh\nexec apptainer .*?)^```$", page, re.M | re.S)[1]
    script = script.replace("<folder of the course>", "COURSE").replace("<image>.sif", "IMAGE")
    fake_command("container.sh", script)
    fake_command("apptainer", APPTAINER)
    text = "import os, sys\nprint(sys.argv[1:], os.environ['IN_CONTAINER'])\nsys.exit(3)"
    (tmp_path / "rank.py").write_text(text)
    env = TASK | {"PYTHON": "./container.sh"}
    status, output = launch("--as-task", "rank.py", "a b", "--", "-x", cwd=tmp_path, env=env)
    assert (status, output.splitlines()[0]) == (3, "['a b', '--', '-x'] yes")


def test_on_several_nodes_an_address_of_this_machine_is_refused(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(subprocess, "check_output", lambda *_: b"node1 node2")
    with pytest.raises(SystemExit, match="where each node finds only itself: unset MASTER_ADDR"):
        slurm.nodes_of_job()
