"""A real Slurm for the tests that need one."""

import os
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
from helpers import ROOT, cannot

# Several tests run at a time. Threads that wait for each other would take the cores from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

LOCAL_SLURM = ROOT / "scripts" / "local_slurm.sh"


def bring_up(nodes, folder):
    """Start a cluster. Return .call(command of local_slurm.sh), .run(command on the login side)."""
    env = {**os.environ, "LOCAL_SLURM_DIR": str(folder)}

    def call(*command, timeout=120, **options):
        command = [str(LOCAL_SLURM), *map(str, command)]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, **options
        )

    done = call("up", nodes, timeout=60)
    assert done.returncode == 0, done.stderr
    return types.SimpleNamespace(
        call=call,
        run=lambda *command, **options: call("shell", *command, **options),
        env=env,
        folder=folder,
    )


@pytest.fixture(scope="session")
def slurm():
    """A Slurm cluster of two nodes; .run(command) runs a command on its login side."""
    if os.geteuid() or shutil.which("slurmctld") is None:
        cannot("needs root and Slurm: scripts/local_slurm.sh install")
    cluster = bring_up(2, f"/run/local-slurm-test-{os.getpid()}")
    yield cluster
    cluster.call("down")


@pytest.fixture
def breakable():
    """A cluster of one's own, to be damaged. As slurm; with .pid("login" or the name of a node)."""
    if os.geteuid() or shutil.which("slurmctld") is None:
        cannot("needs root and Slurm: scripts/local_slurm.sh install")
    folder = Path(f"/run/local-slurm-breakable-{os.getpid()}")
    cluster = bring_up(2, folder)
    cluster.pid = lambda name: int((folder / f"{name}.pid").read_text())
    yield cluster
    cluster.call("down")
