"""Clusters of a real Slurm for the tests, each in a folder of its own."""

import contextlib
import os
import shutil
import subprocess
import types
from pathlib import Path

from support.run import ROOT, require_programs, skip_or_fail_in_ci, works

LOCAL_SLURM = ROOT / "scripts" / "local_slurm.sh"


@contextlib.contextmanager
def bring_up(nodes, name):
    """Have a cluster while the statement runs.

    Yield .call(command of local_slurm.sh), .run(command on the login side), .pid(login or node).
    """
    if os.geteuid() or shutil.which("slurmctld") is None:
        skip_or_fail_in_ci("needs root and Slurm: apt-get install slurm-wlm munge iproute2")
    require_programs("ip", "unshare")
    if not works("unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up"):
        skip_or_fail_in_ci("needs the right to make network namespaces")
    folder = Path(f"/run/local-slurm-{name}-{os.getpid()}")
    env = {**os.environ, "LOCAL_SLURM_DIR": str(folder)}

    def call(*command, input="", timeout=120, cwd=None):
        command = [str(word) for word in (LOCAL_SLURM, *command)]
        pipes = {"input": input, "capture_output": True, "text": True}
        return subprocess.run(command, **pipes, timeout=timeout, cwd=cwd, env=env)

    def run(*command, **options):
        return call("shell", *command, **options)

    def pid(name):
        return int((folder / f"{name}.pid").read_text())

    done = call("up", nodes, timeout=60)
    assert done.returncode == 0, done.stderr
    try:
        yield types.SimpleNamespace(call=call, run=run, pid=pid, env=env, folder=folder)
    finally:
        assert call("down").returncode == 0  # it ends all processes, or says which it cannot
        assert not folder.exists()
        assert str(folder) not in Path("/proc/self/mounts").read_text()
