"""What a program ran on, for anyone who reads its numbers later."""

import os
import platform
from importlib.metadata import version


def cores():
    """Return how many logical cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpus():
    """Return how many GPUs of which kind torch sees, such as 4 x NVIDIA A100, or "no GPU"."""
    import torch  # here, because it takes seconds to load

    count = torch.accelerator.device_count()
    if not count:
        return "no GPU"
    kind = torch.accelerator.current_accelerator().type
    return f"{count} x {torch.get_device_module(kind).get_device_name(0)}"


def described(*more):
    """Return one line on this machine; more is what to add."""
    torch = version("torch").partition("+")[0]  # 2.6.0+cu124 is 2.6.0
    versions = [f"Python {platform.python_version()}", f"torch {torch}"]
    return ", ".join([platform.system(), f"{cores()} CPU cores", gpus(), *versions, *more])
