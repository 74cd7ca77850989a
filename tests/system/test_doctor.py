"""scripts/doctor.sh: says that all is well where it is, and names each fault that is planted."""

import json
import os
import re
import shutil
from importlib.metadata import version

import pytest
import torch
from catalog import read_requirements
from doctor import probe
from support.run import ROOT, copy_tree, run

DOCTOR = ROOT / "scripts" / "doctor.sh"


def diagnose(*arguments, cwd, command=DOCTOR, env=None):
    """Run the doctor. Return its exit status, output, and {check: what it says is wrong}."""
    status, output = run([command, *arguments], 90, cwd, env)
    assert not list(cwd.glob(".doctor*")), "it leaves a file"
    return status, output, dict(re.findall(r"^FAIL (.*?): (.*)$", output, re.M))


def test_all_is_well_on_simulated_nodes(tmp_path):
    status, output, problems = diagnose("--local", "2x2", cwd=tmp_path)
    assert (status, problems) == (0, {}), output
    names = re.findall(r"^ok   (.*?): ", output, re.M)
    assert {"rendezvous", "all_reduce", *read_requirements()} <= set(names)
    assert output.endswith(f"\n=> ready: {len(names)} checks ok, 4 ranks\n")
    assert f"\nok   h5py: {version('h5py')}\n" in output
    assert re.search(r"^ok   all_reduce: 4 MB at \d.* MB/s, gloo, cpu$", output, re.M)


# Is imported by every Python before all else; takes effect on rank 1 of the doctor.
HOOK = """
import os, sys, time
if os.environ.get("RANK") == "1" and "probe.py" in " ".join(sys.orig_argv):
    {what}
"""


def plant(folder, what):
    """Return the environment in which rank 1 of the doctor does this before all else."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK.format(what=what))
    return {"PYTHONPATH": str(folder / "hook")}


def test_what_is_wrong_is_said_all_at_once(tmp_path):
    """A package that is missing on one node, and no data."""
    home, elsewhere = tmp_path / "my course", tmp_path / "somewhere else"
    for folder in ("scripts", "day2"):
        copy_tree(ROOT / folder, home / folder)
    for file in ("requirements.txt", "data/README.md"):
        (home / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, home / file)
    elsewhere.mkdir()
    what = "import importlib.metadata as m; m.version = lambda name, of=m.version: of(name + hide)"
    env = plant(tmp_path, what.replace("hide", '"-hidden" * (name == "h5py")'))
    command = home / "scripts" / "doctor.sh"
    status, output, problems = diagnose("--local", "2", cwd=elsewhere, command=command, env=env)
    assert status == 1
    assert set(problems) == {"data", "h5py"}, output
    assert re.match(r"on simulated node 1: not usable \(.*\)\. Use one env", problems["h5py"])
    assert "git checkout data/MNIST" in problems["data"]
    assert f"\n=> not ready: {len(problems)} of " in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("check", "says", "what"),
    [
        ("all_reduce", r".* the interface is nosuch0 \(of lo", ""),  # they meet, but cannot send
        ("answers", "rank (0, )?1 did not answer; answers came only from ", "time.sleep(100)"),
        ("answers", "rank (0, )?1 did not answer; ", "os.kill(os.getpid(), 11)"),
    ],
)
def test_a_rank_that_cannot_send_or_hangs_or_dies_is_named(check, says, what, tmp_path):
    env = plant(tmp_path, what) if what else {"GLOO_SOCKET_IFNAME": "nosuch0"}
    status, output, problems = diagnose("--local", "2", cwd=tmp_path, env=env)
    assert status == 1
    assert re.match(says, problems[check]), output


def test_outside_of_an_allocation_it_says_where_to_go(tmp_path):
    env = {name: "" for name in os.environ if name.startswith("SLURM_")}
    status, output, _ = diagnose(cwd=tmp_path, env=env)
    assert (status, len(output.splitlines())) == (1, 1)


def test_a_rank_says_what_is_wrong_with_its_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert probe.check_files(".") == probe.check_shm() == ""
    assert "are not seen. Go to a folder on the file system that all" in probe.check_files("token")
    monkeypatch.setattr(probe.os, "access", lambda *_: False)
    assert probe.check_files(".").startswith(f"you cannot write to {tmp_path}. Go to")
    monkeypatch.setattr(probe.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(probe.os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert probe.check_cpus().startswith("1 for 2 threads, which take turns: unset")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert probe.check_cpus().startswith("1, although you asked for 4. See --cpu-bind")
    monkeypatch.setattr(probe, "SHM", 2**60)
    assert "MB free. Remove" in probe.check_shm()
    monkeypatch.setattr(probe, "has_gpus", lambda: True)
    for cuda, words in (("12.6", "torch sees no GPU, though"), (None, "for CPUs only, but there")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert words in probe.find_gpus()[2]


def test_the_exit_status_is_the_verdicts(tmp_path):
    """The launcher may have been stopped: the answers of all ranks are there."""
    lines = ["nodes: node1 node2, ranks on each: 1, in all: 2"]
    found = ("as it should be", "", "Be as the others")  # what a rank prints of each check
    checks = dict.fromkeys(("torch", "GPUs", "rendezvous", "all_reduce"), found)
    lines += [json.dumps({"rank": x, "node": f"node{x + 1}", "checks": checks}) for x in (0, 1)]
    copy_tree(ROOT / "scripts", tmp_path / "scripts")
    launcher = tmp_path / "scripts" / "multinode_setup_and_run.sh"
    launcher.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\nexit 124\n")
    command = tmp_path / "scripts" / "doctor.sh"
    status, output, problems = diagnose("--local", "2", cwd=tmp_path, command=command)
    assert (status, problems) == (0, {}), output
    assert output.endswith("=> ready: 5 checks ok, 2 ranks\n")
