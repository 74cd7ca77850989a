"""The environment of a class: participants can use it, and can change nothing."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.run import ROOT, output_of, run, skip_or_fail_in_ci, works

BASE = f"/usr/bin/python3.{sys.version_info.minor}"  # which every user may start
PARTICIPANT = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]


@pytest.mark.full
def test_a_participant_can_use_it_and_change_nothing(monkeypatch):
    packages = os.pathsep.join(x for x in sys.path if x.endswith("-packages"))
    monkeypatch.setenv("PYTHONPATH", packages)  # as a site's module does
    if not works(*PARTICIPANT, BASE, "--version"):
        skip_or_fail_in_ci(f"needs root, setpriv and {BASE}")
    if not works(*PARTICIPANT, BASE, "-c", "import torch, h5py"):
        pytest.skip("only root can read these packages")
    with tempfile.TemporaryDirectory() as folder:  # others may not enter it
        command = [ROOT / "scripts" / "share_with_class.sh", f"{folder}/my class"]
        output = output_of(run(command, 200, ROOT, {"PYTHON": BASE}), 1)
        assert output.endswith(f"participants can't enter {folder}: chmod a+rx there\n")
        Path(folder).chmod(0o777)
        output = output_of(run(command, 200, ROOT, {"PYTHON": BASE}), 1)
        assert f": everyone can put a different folder there, in {folder}: choose" in output
        Path(folder).chmod(0o755)
        output = output_of(run(command, 200, ROOT, {"PYTHON": BASE}))
        assert "is 1: ok\nEveryone can use it, and only you can change it." in output
        home = Path(folder, "home")
        home.mkdir(mode=0o777)
        home.chmod(0o777)
        clone = output.splitlines()[-3].strip()
        line = f"{clone} && cd course && {BASE} day1/0_torch_dist.py 2"
        line += f" && ! touch '{folder}/my class/x'"
        env = {**os.environ, "HOME": str(home)}
        done = subprocess.run([*PARTICIPANT, "bash", "-c", line], cwd=home, env=env, timeout=100)
        assert done.returncode == 0
