"""Which GPUs the launcher gives to imitated nodes. tests/standin answers for the GPUs.

The launcher asks torch only where /dev has a file of a GPU. So it gets a /dev of its own, with dxg,
which is there on Windows (WSL2), and nothing else of a GPU.
"""

import os
import re
import shlex
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import LAUNCHER, ROOT, cannot, load, works
from launcher import gpus

SHOW = f"""
import os
names = {gpus.MASKS}
masks = [f"{{x.partition('_')[0]}}={{os.environ[x]}}" for x in names if x in os.environ]
line = " ".join(["rank", os.environ["RANK"], "may see", *masks])
os.write(1, f"{{line}}\\n".encode())  # at once, or the lines of two ranks mix
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
        env = {k: v for k, v in env.items() if k not in gpus.MASKS}
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
HIDDEN = ["CUDA=-1 HIP=-1"] * 4


@pytest.mark.parametrize(
    ("local", "variables", "on", "rows"),
    [
        ("2x1", FOUR, "on 4 GPUs", ["CUDA=0", "CUDA=1"]),
        ("1x2", FOUR | {"CUDA_VISIBLE_DEVICES": "2,3"}, "on 2 GPUs", ["CUDA=2,3"] * 2),
        ("2x1", FOUR | {"CUDA_VISIBLE_DEVICES": "2,3"}, "on 2 GPUs", ["CUDA=2", "CUDA=3"]),
        (
            "2x1",
            FOUR | {"CUDA_VISIBLE_DEVICES": "GPU-5ad10003,GPU-5ad10001"},
            "on 2 GPUs",
            ["CUDA=GPU-5ad10003", "CUDA=GPU-5ad10001"],
        ),
        # Of a divided GPU a process sees one part, so the ranks share that one.
        (
            "1x2",
            FOUR | {"STANDIN_MIG": "1", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
            "on 1 GPUs",
            ["CUDA=MIG-a,MIG-b"] * 2,
        ),
        # Fewer GPUs than ranks: one node shares them, and so do nodes that have too few each.
        ("2x2", {"STANDIN_GPUS": "1"}, "on 1 GPUs", [""] * 4),
        # Two nodes would each believe that they have enough.
        (
            "2x2",
            {"STANDIN_GPUS": "2"},
            "on the CPU, because there are fewer",
            HIDDEN,
        ),
        # Slurm sets ROCR's on AMD's GPUs. What it leaves is counted from 0.
        (
            "2x1",
            FOUR | {"STANDIN_KIND": "hip", "ROCR_VISIBLE_DEVICES": "2,3"},
            "on 2 GPUs",
            ["HIP=0 ROCR=2,3", "HIP=1 ROCR=2,3"],
        ),
        ("2x1", FOUR | {"STANDIN_KIND": "xpu"}, "on 4 GPUs", ["ZE=0", "ZE=1"]),
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


@pytest.mark.parametrize(
    ("kind", "masks", "name", "expected"),
    [
        ("cuda", {}, "CUDA_VISIBLE_DEVICES", "0 1 2 3"),
        ("cuda", {"CUDA": " 2 , 3"}, "CUDA_VISIBLE_DEVICES", "2 3"),
        ("cuda", {"CUDA": "-1"}, "", ""),
        ("hip", {}, "HIP_VISIBLE_DEVICES", "0 1 2 3"),
        ("hip", {"HIP": "3,0"}, "HIP_VISIBLE_DEVICES", "3 0"),
        # HIP takes CUDA's variable, too, but its own wins: so its own is set.
        ("hip", {"CUDA": "3,1"}, "HIP_VISIBLE_DEVICES", "3 1"),
        ("hip", {"CUDA": "3,1", "HIP": "2"}, "HIP_VISIBLE_DEVICES", "2"),
        ("hip", {"ROCR": "1,2,3", "HIP": "2,0"}, "HIP_VISIBLE_DEVICES", "2 0"),
        ("xpu", {"CUDA": "0"}, "ZE_AFFINITY_MASK", "0 1 2 3"),
        ("xpu", {"ZE": "3,1"}, "ZE_AFFINITY_MASK", "3 1"),
        # ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE: a GPU is one device, and the mask names its stacks.
        ("xpu", {"ZE": "2.0,2.1,0.1", "FLAT": ""}, "ZE_AFFINITY_MASK", "2.0,2.1 0.1"),
        ("none", {}, "", ""),
    ],
)
def test_gpus_are_called_as_the_variable_of_their_maker_has_them(
    kind, masks, name, expected, monkeypatch
):
    standin = load(ROOT / "tests" / "standin" / "sitecustomize.py")
    for mask in gpus.MASKS:
        monkeypatch.delenv(mask, raising=False)
        if mask.partition("_")[0] in masks:
            monkeypatch.setenv(mask, masks[mask.partition("_")[0]])
    monkeypatch.setenv("STANDIN_KIND", kind)
    monkeypatch.setenv("STANDIN_GPUS", "4")
    if "FLAT" in masks:
        monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    torch = SimpleNamespace(accelerator=mock.Mock(), version=SimpleNamespace(hip=kind == "hip"))
    torch.accelerator.device_count.return_value = 0 if kind == "none" else len(standin.visible())
    torch.accelerator.current_accelerator.return_value.type = standin.KINDS[kind]
    assert gpus.name_gpus(torch) == (name, expected.split())


@pytest.mark.parametrize(
    ("files", "there"),
    [
        ({}, False),
        ({"dev/nvidia0": ""}, True),
        ({"dev/nvidiactl": ""}, False),
        ({"dev/kfd": ""}, True),
        ({"dev/dxg": ""}, True),
        # Intel: of a computing centre, in a laptop; then the screen of a server.
        ({"vendor": "0x8086\n", "class": "0x038000\n"}, True),
        ({"vendor": "0x8086\n", "class": "0x030000\n"}, False),
        ({"vendor": "0x1a03\n", "class": "0x038000\n"}, False),
        ({"vendor": "0x8086\n"}, False),
    ],
)
def test_a_machine_with_gpus_is_known_by_its_files(files, there, tmp_path):
    for name, text in {"dev/dri/renderD128": "", **files}.items():
        card = "" if "/" in name else "sys/class/drm/renderD128/device"
        file = tmp_path / card / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert gpus.has_gpus(tmp_path) == there
