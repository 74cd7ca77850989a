"""What something ran on, for whoever reads the numbers later."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from course.lists import ROOT
from launcher import processes

# The kinds of machines that the course is for, each a column of the table in tests/MEASURED.md.
KINDS = ("no GPU", "one GPU", "several GPUs", "several nodes")


def cores():
    """Return how many logical cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def nodes():
    """Return how many nodes the Slurm allocation has in which this is; 1 without one."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)


def seen_by_torch():
    """Return what torch sees here: torch (its version), count (of GPUs that lessons can use).

    Where there are any, also kind (such as cuda), name (of the first) and backend.
    """
    import torch  # here, because it takes seconds to load
    import torch.distributed as dist

    kind = getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    count = torch.accelerator.device_count()
    if kind == "mps" or (kind == "xpu" and not dist.is_xccl_available()):
        count = 0  # these have no collectives, and the lessons take the CPU
    machine = {"torch": torch.__version__, "count": count}
    if count:
        machine["kind"] = kind
        machine["name"] = torch.get_device_module(kind).get_device_name(0)
        machine["backend"] = dist.get_default_backend_for_device(kind)
    return machine


def look():
    """Return seen_by_torch(), asked of a child: this process takes no memory of a GPU.

    Raises ValueError with a sentence for the user if torch cannot be asked.
    """
    code = "import json; from course import machine; print(json.dumps(machine.seen_by_torch()))"
    command = [sys.executable, "-c", code]
    job = processes.run(command, 300, cwd=ROOT / "scripts", stderr=subprocess.PIPE)
    if job.trouble:
        reason = (job.errors.strip().splitlines() or [job.trouble])[-1]
        raise ValueError(f"This Python cannot ask torch which GPUs there are: {reason}")
    return json.loads(job.output.splitlines()[-1])


def kind_of(machine):
    """Return which of KINDS a machine is, from the dict in its record."""
    if machine.get("nodes", 1) > 1:
        return "several nodes"
    return KINDS[min(machine["count"], 2)]


def name_of(machine):
    """Return a name for the record of a machine, such as 2-cpu-cores or 2-nodes-4-nvidia-a100."""
    name = gpus(machine) or f"{machine['cores']} CPU cores"
    if machine.get("nodes", 1) > 1:
        name = f"{machine['nodes']} nodes {name}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def gpus(machine):
    """Return which GPUs a machine has, such as 4 NVIDIA A100; "" if none."""
    return f"{machine['count']} {machine['name']}" if machine["count"] else ""


def described(gpus, *more):
    """Return one line on this machine; gpus is text, "" for none, and more is what else to say."""
    words = [
        platform.system(),
        f"{cores()} CPU cores",
        gpus or "no GPU",
        f"Python {platform.python_version()}",
        f"torch {version('torch').partition('+')[0]}",  # 2.6.0+cu124 is 2.6.0
        *more,
    ]
    return ", ".join(words)


def recorded(command, *more):
    """Return one line on where and when a command was recorded; more is what else to say."""
    words = described(gpus(look()), *more)
    return f"Recorded on {time.strftime('%Y-%m-%d')} with `{command}`: {words}.\n"


def facts(command, began):
    """Return what a command ran on, when and how, as {name: text}; began in seconds as time."""
    begin = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
    every = {
        "command": command,
        "when": f"{begin} to {time.strftime('%H:%M %Z')}",
        "machine": described(gpus(look())),
        "processor": processor(),
        "system": platform.platform(),
        "Slurm nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
    }
    return {name: text for name, text in every.items() if text}


def processor():
    """Return the name of the CPU, or its kind where the system does not say more."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)", file.read_text(), re.M) if file.exists() else []
    return names[0] if names else platform.machine()
