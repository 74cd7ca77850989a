"""Which GPUs there are, and the variable that chooses among them: NVIDIA, AMD and Intel.

It needs only the standard library. Functions that need torch get it as an argument.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

# Names in /dev, of NVIDIA, AMD, Windows (WSL2) and Intel. Intel's may be there without a GPU.
DEVICES = Path("/dev")
NAMES = "nvidia[0-9]*", "kfd", "dxg", "dri"
# What hides GPUs.
MASKS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"


def has_gpus() -> bool:
    """Return whether this machine has GPUs of NVIDIA or AMD, and no variable hides them."""
    hidden = any(os.environ.get(name) in ("", "-1") for name in MASKS)
    return not hidden and any(any(DEVICES.glob(name)) for name in NAMES[:3])


def find_gpus() -> list[str]:
    """Return the variable that chooses GPUs on this machine, and the GPUs that are chosen.

    They have the names that the variable uses: ["CUDA_VISIBLE_DEVICES", "2", "3"]. Without a GPU
    the list is empty, and nobody has to wait for torch.
    """
    if not any(any(DEVICES.glob(name)) for name in NAMES):
        return []
    # In a separate process, because torch is large. If it cannot be imported, the ranks say so.
    found = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    return found.stdout.split()


def own_gpu_only(environment: Mapping[str, str]) -> bool:
    """Return whether a task of Slurm may see its own GPU only, and not the others of its node.

    Not if its mask names several, or parts of divided GPUs (MIG): a process sees at most one part,
    and NCCL takes two parts of one GPU for the same GPU.
    """
    mask = next((environment[name] for name in MASKS if environment.get(name)), "")
    return "," not in mask and "MIG" not in mask


def name_gpus(torch: ModuleType) -> tuple[str, list[str]]:
    """Return the variable that chooses GPUs, and those that torch sees, as the variable has them.

    Such as ("CUDA_VISIBLE_DEVICES", ["2", "3"]). Without a GPU: ("", []).
    """
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind == "cpu":
        return "", []
    name = mask = "ZE_AFFINITY_MASK" if kind == "xpu" else "CUDA_VISIBLE_DEVICES"
    if torch.version.hip:
        # It overrides CUDA's. PyTorch also counts by it, and by CUDA's only if ROCR's is not set:
        # ROCR's is applied first, and the other variables count what it leaves.
        name = "HIP_VISIBLE_DEVICES"
        mask = name if os.environ.get(name) else mask
    gpus = [entry.strip() for entry in os.environ.get(mask, "").split(",") if entry.strip()]
    # A mask may name more than a process sees, such as several parts of a divided GPU (MIG).
    return name, (gpus or [str(number) for number in range(count)])[:count]


def share_gpus(found: list[str], nodes: int, each: int) -> tuple[list[dict[str, str]], str]:
    """Divide the GPUs of find_gpus among nodes with so many ranks each.

    Return the variables of each node, and in words what the ranks run on.
    """
    if not found:
        return [{}] * nodes, "the CPU"
    name, *gpus = found
    if len(gpus) >= nodes * each:
        parts = [gpus[node * each : (node + 1) * each] for node in range(nodes)]
        return [{name: ",".join(part)} for part in parts], f"{len(gpus)} GPUs"
    if nodes > 1 and each <= len(gpus):  # each node would think that it has enough
        hidden = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
        hidden["ONEAPI_DEVICE_SELECTOR"] = "opencl:cpu"
        return [hidden] * nodes, "the CPU, because there are fewer GPUs than ranks"
    return [{}] * nodes, f"{len(gpus)} GPUs"


if __name__ == "__main__":  # for find_gpus
    import torch

    name, gpus = name_gpus(torch)
    print(name, *gpus)
