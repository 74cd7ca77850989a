"""Which GPUs the launcher gives to imitated nodes. tests/standin answers for the GPUs.

The launcher asks torch only where /dev has a file of a GPU. So it gets a /dev of its own, with dxg,
which is there on Windows (WSL2), and nothing else of a GPU.
"""

import os
import re
import shlex
import subprocess

import pytest
from helpers import LAUNCHER, ROOT, cannot, works

SHOW = """
import os
names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
masks = [os.environ[name] for name in names if name in os.environ]
line = " ".join(["rank", os.environ["RANK"], "may see", *masks])
os.write(1, f"{line}\\n".encode())  # at once, or the lines of two ranks mix
"""
DEVICES = """
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
for name in null zero full random urandom tty; do
  : >"$1/$name"
  mount --bind "/dev/$name" "$1/$name"
done
mkdir "$1/shm"
mount --rbind /dev/shm "$1/shm"
ln -s /proc/self/fd "$1/fd"
: >"$1/dxg"
mount --rbind "$1" /dev
shift
exec "$@"
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts the launcher where there are GPUs; it returns what was printed."""
    if os.geteuid() or not works("unshare", "--mount", "true"):
        cannot("needs root and the right to make a mount namespace")
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "dev").mkdir()

    def launcher(line, **variables):
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        env |= {"PYTHONPATH": str(ROOT / "tests" / "standin"), **variables}
        own = ["unshare", "--mount", "sh", "-c", DEVICES, "sh", str(tmp_path / "dev")]
        done = subprocess.run(
            [*own, str(LAUNCHER), *shlex.split(line)],
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return launcher


FOUR = {"STANDIN_GPUS": "4"}


@pytest.mark.parametrize(
    ("local", "variables", "on", "rows"),
    [
        ("2x1", FOUR, "on 4 GPUs", ["0", "1"]),
        ("1x2", FOUR | {"CUDA_VISIBLE_DEVICES": "2,3"}, "on 2 GPUs", ["2,3"] * 2),
        ("2x1", FOUR | {"CUDA_VISIBLE_DEVICES": "2,3"}, "on 2 GPUs", ["2", "3"]),
        (
            "2x1",
            FOUR | {"CUDA_VISIBLE_DEVICES": "GPU-5ad10003,GPU-5ad10001"},
            "on 2 GPUs",
            ["GPU-5ad10003", "GPU-5ad10001"],
        ),
        # Of a divided GPU a process sees one part, so the ranks share that one.
        (
            "1x2",
            FOUR | {"STANDIN_MIG": "1", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
            "on 1 GPUs",
            ["MIG-a,MIG-b"] * 2,
        ),
        # Fewer GPUs than ranks: one node shares them, and so do nodes that have too few each.
        ("2x2", {"STANDIN_GPUS": "1"}, "on 1 GPUs", [""] * 4),
        # Two nodes would each believe that they have enough.
        ("2x2", {"STANDIN_GPUS": "2"}, "on the CPU, because there are fewer", ["-1 -1"] * 4),
        (
            "2x1",
            FOUR | {"STANDIN_KIND": "hip", "HIP_VISIBLE_DEVICES": "3,0"},
            "on 2 GPUs",
            ["3", "0"],
        ),
        ("2x1", FOUR | {"STANDIN_KIND": "xpu"}, "on 4 GPUs", ["0", "1"]),
        ("1x1", {"STANDIN_KIND": "none"}, "on the CPU", [""]),
    ],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else None,
)
def test_imitated_nodes_divide_the_gpus_that_the_user_has_left_visible(
    local, variables, on, rows, start
):
    output = start(f"--local {local} show.py", **variables)
    assert f", {on}" in output, output
    seen = sorted(re.findall(r"^rank (\d+) may see ?(.*)$", output, re.M))
    assert seen == [(str(rank), row) for rank, row in enumerate(rows)]
