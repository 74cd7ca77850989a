"""Which GPUs there are, and the variable that chooses among them: NVIDIA, AMD and Intel.

The standard library is enough. What needs torch is given it.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

# What hides GPUs. On AMD's, ROCR's is applied first, and HIP's (or CUDA's) counts what that leaves.
MASKS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
FILES = "nvidia[0-9]*", "kfd", "dxg"  # in /dev: of NVIDIA, of AMD, of WSL2


def has_gpus(root="/"):
    """Return whether this machine has a GPU to compute with, whatever torch can do with it.

    Of Intel's, only those of computing centres count: their class, as PCI has it, is 0x0380. The
    class of those in a PC, 0x0300, also has many that only show a picture.
    """
    root = Path(root)
    if any(any((root / "dev").glob(name)) for name in FILES):
        return True
    for card in (root / "sys" / "class" / "drm").glob("render*/device"):
        try:
            vendor, kind = [(card / name).read_text() for name in ("vendor", "class")]
        except OSError:
            continue
        if vendor.strip() == "0x8086" and kind.startswith("0x0380"):
            return True
    return False


def hidden_by_mask():
    """Return whether a variable hides all GPUs."""
    return any(os.environ.get(name) in ("", "-1") for name in MASKS)


def name_gpus(torch):
    """Return the variable that chooses GPUs, and those that torch sees, as the variable has them.

    Such as ("CUDA_VISIBLE_DEVICES", ["2", "3"]). Where there are none: ("", []).
    """
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind in ("cpu", "mps"):  # the lessons do not use Apple's
        return "", []
    name = mask = "ZE_AFFINITY_MASK" if kind == "xpu" else "CUDA_VISIBLE_DEVICES"
    if torch.version.hip:
        # It wins over CUDA's. PyTorch also counts by it, and by CUDA's only if ROCR's is not set.
        name = "HIP_VISIBLE_DEVICES"
        mask = name if os.environ.get(name) else mask
    gpus = [entry.strip() for entry in os.environ.get(mask, "").split(",") if entry.strip()]
    if kind == "xpu" and len(gpus) > count:  # the stacks of one GPU, such as 0.0 and 0.1
        groups = itertools.groupby(gpus, lambda entry: entry.partition(".")[0])
        gpus = [",".join(group) for _, group in groups]
    # A mask may name more than a process sees, such as several parts of a divided GPU (MIG).
    return name, (gpus or [str(number) for number in range(count)])[:count]


def find_gpus():
    """Return the variable that chooses GPUs on this machine, and the GPUs that are chosen.

    They are called as the variable calls them: ["CUDA_VISIBLE_DEVICES", "2", "3"]. Where there are
    none the list is empty, and nobody has to wait for torch.
    """
    if not has_gpus() and not Path("/dev/dri").exists():  # which Intel's may have alone
        return []
    # In a process of its own: torch is large. If it cannot be imported, the ranks will say so, too.
    ask = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
    return ask.communicate()[0].decode().split()


def share_gpus(found, nodes, each):
    """Divide the GPUs of find_gpus among nodes with so many ranks each.

    Return the variables of each node, and in words what the ranks run on.
    """
    if not found:
        return [{}] * nodes, "the CPU"
    name, *gpus = found
    if len(gpus) >= nodes * each:
        parts = [gpus[node * each : (node + 1) * each] for node in range(nodes)]
        return [{name: ",".join(part)} for part in parts], f"{len(gpus)} GPUs"
    if nodes > 1 and each <= len(gpus):  # each node would believe that it has enough
        hidden = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
        hidden["ONEAPI_DEVICE_SELECTOR"] = "opencl:cpu"
        return [hidden] * nodes, "the CPU, because there are fewer GPUs than ranks"
    return [{}] * nodes, f"{len(gpus)} GPUs"


if __name__ == "__main__":  # for find_gpus
    import torch

    name, gpus = name_gpus(torch)
    print(name, *gpus)
