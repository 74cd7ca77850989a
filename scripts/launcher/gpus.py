"""Which GPUs there are, and the variable that chooses among them: NVIDIA, AMD and Intel.

The standard library is enough. What needs torch is given it.
"""

import itertools
import os
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
