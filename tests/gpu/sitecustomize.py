"""A stand-in accelerator: Python answers as on a machine with GPUs, and computes nothing on them.

For tests of what *chooses*: choose_device, the launcher. It works in every Python process that has
this folder, with its whole path, in PYTHONPATH, and one of these:

    STANDIN_GPUS    how many accelerators the machine has: 0, 1, 2, 4, 8 ...
    STANDIN_KIND    cuda (NVIDIA, if it is not given), hip (AMD), xpu (Intel), or
                    none: a torch that was built without CUDA (torch.version.cuda is None)
    STANDIN_MIG     1: every GPU is divided. A process then sees one part at most, as with CUDA

The masks hold as they do for torch, and are read at every call, as STANDIN_GPUS is.
"""

import os

KINDS = {"cuda": "cuda", "hip": "cuda", "xpu": "xpu", "none": "cpu"}  # and the type of the device


def kind():
    return os.environ.get("STANDIN_KIND", "cuda")


def uuid_of(number):
    """Return the uuid of the GPU with this number in the machine, without the prefix GPU-."""
    return f"5ad1{number:04x}"


def choose(mask, devices):
    """Return those of the devices that a mask lets through, in its order. None lets all."""
    if mask is None:
        return devices
    chosen = []
    for entry in mask.split(","):
        fits = [d for i, d in enumerate(devices) if entry in (str(i), f"GPU-{uuid_of(d)}")]
        if not fits:
            break  # and what comes after it is not looked at
        chosen += fits
    return chosen


def visible():
    """Return what this process sees: numbers of GPUs in the machine, or names of parts, MIG-..."""
    devices = list(range(int(os.environ.get("STANDIN_GPUS", 0))))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind() == "xpu":
        mask = os.environ.get("ZE_AFFINITY_MASK") or None
    elif kind() == "hip":
        # ROCR's comes first; HIP's counts what it leaves. An empty one hides nothing, -1 does.
        devices = choose(os.environ.get("ROCR_VISIBLE_DEVICES"), devices)
        mask = os.environ.get("HIP_VISIBLE_DEVICES") or mask or None
    elif os.environ.get("STANDIN_MIG") == "1":
        if mask and mask.startswith("MIG-"):
            return mask.split(",")[:1]
        return [f"MIG-{uuid_of(device)}" for device in choose(mask, devices)][:1]
    return choose(mask, devices)


def device_count():
    return 0 if kind() == "none" else len(visible())


def is_available():
    return device_count() > 0


def set_device_index(index):
    if index >= device_count():
        raise RuntimeError(f"invalid device ordinal: {index}, of {device_count()}")


def answers(torch):
    """Return what a torch must say in the place of its own: [(module, name, value), ...]."""

    def current_accelerator(check_available=False):
        if kind() == "none" or (check_available and not is_available()):
            return None
        return torch.device(KINDS[kind()])

    own = {"none": None, "xpu": torch.xpu}.get(kind(), torch.cuda)
    for module in (torch.cuda, torch.xpu, torch.accelerator):
        there = module in (own, torch.accelerator)
        yield module, "is_available", is_available if there else lambda: False
        yield module, "device_count", device_count if there else lambda: 0
    yield torch.accelerator, "current_accelerator", current_accelerator
    yield torch.accelerator, "set_device_index", set_device_index
    yield torch.version, "cuda", (torch.version.cuda or "13.2") if kind() == "cuda" else None
    yield torch.version, "hip", "7.2" if kind() == "hip" else None
    yield torch.version, "xpu", "20260000" if kind() == "xpu" else None
    yield torch.distributed, "is_nccl_available", lambda: KINDS[kind()] == "cuda"
    yield torch.distributed, "is_xccl_available", lambda: kind() == "xpu"


if "STANDIN_GPUS" in os.environ or "STANDIN_KIND" in os.environ:
    import torch

    for answer in answers(torch):
        setattr(*answer)
