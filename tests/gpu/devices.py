"""Which device and which backend the lessons choose on which machine, as Markdown tables.

    python tests/gpu/devices.py day1
    python tests/gpu/devices.py day2

Nothing of it needs a GPU: the lessons' own functions are asked, with the stand-in accelerator.
update_docs.py --devices puts the tables into the pages of the days.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path
from unittest import mock

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
if __name__ == "__main__":
    for variable in list(os.environ):
        if variable in MASKS or variable.startswith(("SLURM_", "STANDIN_")):
            del os.environ[variable]
    os.environ["STANDIN_GPUS"] = "4"  # before the stand-in is imported, and torch after it
    sys.modules.pop("sitecustomize", None)  # the system may have one of its own

import sitecustomize  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FILES = {"day1": "day1/4_mnist_manual_ddp.py", "day2": "day2/10_mnist_ddp_pt_multinode.py"}
LESSON_15 = "day2/15_linear_accelerate.py"
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
SETUPS = {"day1": DAY1, "day2": DAY2}


class Rank:
    """The lessons of a day, asked as a rank of a node with the stand-in's GPUs."""

    def __init__(self, day):
        """Load the lessons. Day 2 has lesson 15, which chooses through Accelerate."""
        self.choose_device = load(FILES[day]).choose_device
        self.make_accelerator = None
        if day == "day2":
            lesson = load(LESSON_15)
            lesson.Accelerator = device_for_accelerate
            self.make_accelerator = lesson.make_accelerator

    def choose(self, rank, ranks, variables):
        """Return (kind of device, GPU, backend, lesson 15's kind of device).

        GPU is its number in the machine, whatever a mask calls it; "" on a CPU.
        """
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        for name, value in variables.items():
            env[name] = value.format(rank=rank, world_size=ranks)
        with mock.patch.dict(os.environ, {name: str(value) for name, value in env.items()}):
            device, backend = self.choose_device(rank, ranks)
            gpu = ""
            if device.type != "cpu":
                gpu = str(sitecustomize.visible()[device.index])
                gpu = re.sub(r"MIG-.*", "a part", gpu)
            lesson_15 = self.make_accelerator and self.make_accelerator()
        return device.type, gpu, backend, lesson_15


def device_for_accelerate(cpu, kwargs_handlers):
    """Stand in the place of Accelerator: return the kind of device that it would be made for."""
    return "CPU" if cpu else "GPU"


def load(name):
    """Return a lesson as a module."""
    spec = importlib.util.spec_from_file_location("lesson", ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(variables):
    """Return the masks of a set-up as a user would type them."""
    masks = [f"`{name}={variables[name]}`" for name in MASKS if name in variables]
    text = ", ".join(masks)
    if "{rank}" in text:
        return text.replace("{rank}", "0") + " to `3`"
    return text


def table(day):
    """Return the table of a day's set-ups."""
    head = ["what is there", "ranks on the node", "mask", "device", "GPU of each rank", "backend"]
    if day == "day2":
        head.append("lesson 15")
    rows = [head, ["---"] * len(head)]
    lessons = Rank(day)
    for there, ranks, variables in SETUPS[day]:
        chosen = [lessons.choose(rank, ranks, variables) for rank in range(ranks)]
        kinds, gpus, backends, lesson_15 = zip(*chosen, strict=True)
        # Ranks that do not agree would never meet.
        assert len(set(zip(kinds, backends, lesson_15, strict=True))) == 1, (there, chosen)
        row = [there, str(ranks), words(variables), kinds[0], " ".join(gpus).strip(), backends[0]]
        if day == "day2":
            row.append(lesson_15[0])
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(table(sys.argv[1]), end="")
