"""Which device and which backend the lessons choose on which machine, as Markdown tables.

    python tests/standin/devices.py day1
    python tests/standin/devices.py day2

Nothing of it needs a GPU: the lessons' own functions are asked, with the stand-in accelerator.
update_docs.py --devices puts the tables into the pages of the days.
"""

import contextlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# What is there, how many ranks there are on the node, and the variables of each rank. In these,
# {rank} is the number of the rank.
ONE, FOUR, EIGHT = ({"STANDIN_GPUS": str(gpus)} for gpus in (1, 4, 8))
AMD, INTEL = FOUR | {"STANDIN_KIND": "hip"}, FOUR | {"STANDIN_KIND": "xpu"}
DAY1 = [
    ("no GPU", 4, {"STANDIN_KIND": "none"}),
    ("1 GPU", 1, ONE),
    ("1 GPU", 2, ONE),
    ("1 GPU", 4, ONE),
    ("4 GPUs", 1, FOUR),
    ("4 GPUs", 2, FOUR),
    ("4 GPUs", 4, FOUR),
    ("4 GPUs", 8, FOUR),
    ("8 GPUs", 4, EIGHT),
    ("4 GPUs", 2, FOUR | {"CUDA_VISIBLE_DEVICES": "3,1"}),
    ("4 GPUs", 4, FOUR | {"CUDA_VISIBLE_DEVICES": "2,3"}),
    ("4 GPUs", 4, FOUR | {"CUDA_VISIBLE_DEVICES": ""}),
    ("4 GPUs, divided (MIG)", 2, FOUR | {"STANDIN_MIG": "1"}),
    ("4 GPUs of AMD", 4, AMD),
    ("4 GPUs of AMD", 2, AMD | {"HIP_VISIBLE_DEVICES": "2,3"}),
    ("4 GPUs of AMD", 4, AMD | {"CUDA_VISIBLE_DEVICES": ""}),
    ("4 GPUs of AMD", 4, AMD | {"CUDA_VISIBLE_DEVICES": "-1"}),
    ("4 GPUs of Intel", 4, INTEL),
    ("4 GPUs of Intel", 2, INTEL | {"ZE_AFFINITY_MASK": "2,3"}),
    ("4 GPUs of Intel", 8, INTEL),
    ("4 GPUs of Intel, torch before 2.8", 4, INTEL | {"STANDIN_XCCL": "0"}),
]
# An allocation of whole nodes with 4 GPUs, in which srun has started 4 tasks on each.
JOB = FOUR | {"SLURM_GPUS_ON_NODE": "4"}
# GPUS_ON_NODE is set by the launcher, for tasks of srun only.
STEP = JOB | {"SLURM_STEP_NUM_TASKS": "{world_size}", "GPUS_ON_NODE": "4"}
SHELL = JOB | {"SLURM_STEP_NUM_TASKS": "4"}
ONE_EACH = {"CUDA_VISIBLE_DEVICES": "{rank}"}
DAY2 = [
    ("`srun`, each task sees all GPUs", 4, STEP),
    ("the same with too many tasks", 8, STEP),
    ("`srun`, each task sees one GPU", 4, STEP | ONE_EACH),
    (
        "the same on a site that does not set SLURM_GPUS_ON_NODE",
        4,
        FOUR | {"SLURM_STEP_NUM_TASKS": "{world_size}"} | ONE_EACH,
    ),
    (
        "`srun`, each task sees the parts of divided GPUs (MIG)",
        4,
        STEP | {"STANDIN_MIG": "1", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d"},
    ),
    ("`srun`, one task, in it `torchrun`", 4, JOB | {"SLURM_STEP_NUM_TASKS": "1"}),
    (
        "the same, where this task sees one GPU",
        4,
        FOUR
        | {"SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_NUM_TASKS": "1", "CUDA_VISIBLE_DEVICES": "0"},
    ),
    ("`--local 1x4` in the allocation", 4, JOB),
    ("the same with a mask", 4, JOB | {"CUDA_VISIBLE_DEVICES": "0"}),
    (
        "the same in a shell opened by `srun`",
        4,
        JOB | {"SLURM_STEP_NUM_TASKS": "1", "CUDA_VISIBLE_DEVICES": "0"},
    ),
    (
        "`--local 1x4` in a shell of four tasks, with a mask",
        4,
        SHELL | {"CUDA_VISIBLE_DEVICES": "0"},
    ),
    ("the same with two GPUs", 4, SHELL | {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ("`--local 1x4`, no Slurm, 1 GPU", 4, ONE),
]


class ChosenError(Exception):
    """Raised in place of making an Accelerator, to see what it would be made with."""


def device_of_lesson_15(lesson):
    """Return the kind of device that lesson 15 has Accelerate choose."""
    lesson["main"].__globals__["Accelerator"] = mock.Mock(side_effect=ChosenError)
    with contextlib.suppress(ChosenError):
        lesson["main"](None)
    return "CPU" if lesson["main"].__globals__["Accelerator"].call_args.kwargs["cpu"] else "GPU"


def choose(ranks, variables, choose_device, lesson_15=None):
    """Return what each of the ranks of a node chooses, [(kind, GPU, backend, lesson 15's)].

    GPU is its number in the machine, whatever the mask calls it; None on a CPU.
    """
    import sitecustomize

    chosen = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        own |= {k: v.format(rank=rank, world_size=ranks) for k, v in variables.items()}
        with mock.patch.dict(os.environ, {k: str(v) for k, v in own.items()}):
            device, backend = choose_device(rank, ranks)
            gpu = None if device.type == "cpu" else sitecustomize.visible()[device.index]
            also = lesson_15 and device_of_lesson_15(lesson_15)
            chosen.append((device.type, gpu, backend, also))
    return chosen


def words(variables):
    """Return the mask of a set-up as a user would type it."""
    masks = [f"`{name}={variables[name]}`" for name in MASKS if name in variables]
    return ", ".join(masks).replace("{rank}", "0") + (" to `3`" if "{rank}" in str(masks) else "")


def table(day):
    """Return the table of a day's set-ups. To be called where the stand-in is at work."""
    head = ["what is there", "ranks on the node", "mask", "device", "GPU of each rank", "backend"]
    head += ["lesson 15"] if day == "day2" else []
    rows = [head, ["---"] * len(head)]
    file = "day1/4_mnist_manual_ddp.py" if day == "day1" else "day2/10_mnist_ddp_pt_multinode.py"
    choose_device = runpy.run_path(str(ROOT / file))["choose_device"]
    lesson_15 = None
    if day == "day2":
        lesson_15 = runpy.run_path(str(ROOT / "day2" / "15_linear_accelerate.py"))
    for there, ranks, variables in DAY1 if day == "day1" else DAY2:
        chosen = choose(ranks, variables, choose_device, lesson_15)
        kinds, gpus, backends, also = ([*x] for x in zip(*chosen))
        gpus = [re.sub(r"MIG-.*", "a part", str(gpu)) for gpu in gpus]
        row = [there, str(ranks), words(variables), kinds[0]]
        row += ["" if kinds[0] == "cpu" else " ".join(gpus), backends[0]]
        row += [also[0]] if lesson_15 else []
        # Ranks that do not agree would never meet.
        assert len({*zip(kinds, backends, also)}) == 1, (there, chosen)
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def make(day):
    """Return the table of a day, made in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in MASKS}
    env = {name: value for name, value in env.items() if not name.startswith("SLURM_")}
    env |= {"PYTHONPATH": str(FOLDER), "STANDIN_GPUS": "4"}
    command = [sys.executable, __file__, day, "--child"]
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    day = sys.argv[1]
    print(table(day) if "--child" in sys.argv else make(day), end="")
