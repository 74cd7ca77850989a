"""Ask the lessons on stand-in GPUs what the table of a page says: which device, which backend.

    PYTHONPATH=$PWD/tests/gpu STANDIN_GPUS=4 python tests/gpu/devices.py day2/SITES.md

It takes what is there, the number of ranks and the mask of each row, and prints the rows as the
lessons answer now. No GPU is needed. A GPU that the launcher gives to a rank must be the one that
the rank then sees.
"""

import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import sitecustomize
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from launcher.gpus import name_gpus, own_gpu_only  # noqa: E402

LESSON = "day2/10_mnist_ddp_pt_multinode.py"  # choose_device is the same in all
LESSON_20 = "day2/20_linear_accelerate.py"
TABLE = re.compile(r"(?<=\n)\| what is there .*\n\| --- .*\n((?:\| .*\n)+)")
FOUR = {"STANDIN_GPUS": "4"}
TASK = FOUR | {"SLURM_GPUS_ON_NODE": "4"}
AMD, INTEL = FOUR | {"STANDIN_KIND": "hip"}, FOUR | {"STANDIN_KIND": "xpu"}
# What is there, where it is not just four GPUs.
MACHINES = {
    "no GPU": {"STANDIN_KIND": "none"},
    "4 GPUs, divided (MIG)": FOUR | {"STANDIN_MIG": "1"},
    "4 GPUs of AMD": AMD,
    "4 GPUs of Intel": INTEL,
    "`srun`, each task sees all GPUs": TASK,
    "`srun`, each task sees one GPU": TASK,
    "`srun`, each task sees the parts of divided GPUs (MIG)": TASK | {"STANDIN_MIG": "1"},
}
# More masks for the launcher, which gives GPUs to ranks by their names.
MASKED = [
    FOUR | {"CUDA_VISIBLE_DEVICES": "GPU-5ad10003"},
    # HIP takes CUDA's variable, too, but its own wins.
    AMD | {"CUDA_VISIBLE_DEVICES": "3,1"},
    AMD | {"CUDA_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "2"},
    # Slurm sets ROCR's. What it leaves is counted from 0.
    AMD | {"ROCR_VISIBLE_DEVICES": "2,3"},
    INTEL | {"CUDA_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "3,1"},
]


def environment_of(row, rank):
    """Return the variables of one rank; row: [what is there, ranks, mask, ...]."""
    there, ranks, mask, *_ = row
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    env |= MACHINES.get(there, FOUR)
    for name, value in re.findall(r"`(\w+)=([^`]*)`", mask):
        env[name] = rank if " to " in mask else value
    env = {name: str(value) for name, value in env.items()}
    if "SLURM_GPUS_ON_NODE" in env and own_gpu_only(env):  # as the launcher does for a task
        env["GPUS_ON_NODE"] = env["SLURM_GPUS_ON_NODE"]
    return env


def ask(row, choose_device, make_accelerator):
    """Return the row with the lessons' answers."""
    ranks = int(row[1])
    devices, gpus, backends, accelerators = [], [], [], []
    for rank in range(ranks):
        with mock.patch.dict(os.environ, environment_of(row, rank)):
            device, backend = choose_device(rank, ranks)
            devices.append(device.type)
            backends.append(backend)
            accelerators.append(make_accelerator())
            check_names()
            if device.type != "cpu":
                gpu = str(sitecustomize.visible()[device.index])
                gpus.append("a part" if gpu.startswith("MIG-") else gpu)
    # Ranks that do not agree would never meet.
    assert len(set(zip(devices, backends, accelerators))) == 1, row
    return [*row[:3], devices[0], " ".join(gpus), backends[0], accelerators[0]]


def check_names():
    """Assert that who gets a GPU by the name that the launcher knows sees that one."""
    with mock.patch.object(torch.version, "hip", sitecustomize.kind() == "hip"):
        name, gpus = name_gpus(torch)
    seen = sitecustomize.visible() if sitecustomize.is_available() else []
    for gpu, own in zip(seen, gpus, strict=True):
        with mock.patch.dict(os.environ, {name: own}):
            assert sitecustomize.visible() == [gpu], (name, own)


def main(page):
    for env in MASKED:
        with mock.patch.dict(os.environ, env):
            check_names()
    choose_device = runpy.run_path(str(ROOT / LESSON))["choose_device"]
    make_accelerator = runpy.run_path(str(ROOT / LESSON_20))["make_accelerator"]
    # The kind of device that an Accelerator would be made for.
    make_accelerator.__globals__["Accelerator"] = lambda cpu, **_: "CPU" if cpu else "GPU"
    for line in TABLE.search((ROOT / page).read_text())[1].splitlines():
        row = [cell.strip() for cell in line[1:-1].split("|")]
        print(f"| {' | '.join(ask(row, choose_device, make_accelerator))} |")


if __name__ == "__main__":
    main(sys.argv[1])
