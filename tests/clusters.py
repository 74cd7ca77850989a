"""Clusters of a real Slurm for the tests, each in a folder of its own."""

import os
import shutil
import subprocess
import tempfile
import types

from helpers import ROOT, cannot, need, works
from launcher import processes

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
