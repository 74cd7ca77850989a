"""A real Slurm for the tests that need one, and what the surroundings must not change."""

import os
import shutil
import signal
import subprocess
import tempfile
import types
from pathlib import Path

import pytest
import torch
from helpers import ROOT, cannot, need, works
from lib import processes

# In the background of a script, Ctrl-C is ignored, under nohup the end of the terminal, and every
# child inherits that. With a handler that does nothing, this process goes on ignoring it, and its
# children do not.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# What bash, git and df say is compared: in English, whatever language the user has.
os.environ.pop("LANGUAGE", None)
languages = [os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG")]
if not next(filter(None, languages), "C").startswith(("C", "POSIX", "en")):
    os.environ["LC_ALL"] = "C.UTF-8"

# Marks the short tests, and writes the record of run_tests.sh --torch.
pytest_plugins = ["works_with"]

# Several tests run at a time. Threads that wait for each other would take the cores from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

LOCAL_SLURM = ROOT / "scripts" / "local_slurm.sh"


def need_slurm():
    """Skip where no cluster can be started."""
    if os.geteuid() or shutil.which("slurmctld") is None:
        cannot("needs root and Slurm: scripts/local_slurm.sh install")
    need("ip", "unshare")
    if not works("unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up"):
        cannot("needs the right to make network namespaces")


def bring_up(nodes, folder):
    """Start a cluster. Return .call(command of local_slurm.sh), .run(command on the login side)."""
    need_slurm()
    env = {**os.environ, "LOCAL_SLURM_DIR": str(folder)}

    def call(*command, timeout=120, **options):
        command = [str(LOCAL_SLURM), *map(str, command)]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, **options
        )

    def run(*command, input="", timeout=120, **options):
        command = [LOCAL_SLURM, "shell", *command]
        options |= {"env": env, "stderr": subprocess.PIPE}
        with tempfile.TemporaryFile("w+") as typed:
            typed.write(input)
            typed.seek(0)
            job = processes.run(command, timeout, stdin=typed, **options)
        assert not job.stopped, f"{job.trouble}:\n{job.output}{job.errors}"
        return subprocess.CompletedProcess(command, job.status, job.output, job.errors)

    done = call("up", nodes, timeout=60)
    assert done.returncode == 0, done.stderr
    return types.SimpleNamespace(
        call=call,
        run=run,
        env=env,
        folder=folder,
    )


@pytest.fixture(scope="session")
def slurm():
    """A Slurm cluster of two nodes; .run(command) runs a command on its login side."""
    cluster = bring_up(2, f"/run/local-slurm-test-{os.getpid()}")
    yield cluster
    cluster.call("down")


@pytest.fixture
def breakable():
    """A cluster of one's own, to be damaged. As slurm; with .pid("login" or the name of a node)."""
    folder = Path(f"/run/local-slurm-breakable-{os.getpid()}")
    cluster = bring_up(2, folder)
    cluster.pid = lambda name: int((folder / f"{name}.pid").read_text())
    yield cluster
    cluster.call("down")
