"""What something ran on, for whoever reads the numbers later."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from launcher import processes
from course.lists import ROOT

# The kinds of machines that the course is for, each a column of the table in tests/MEASURED.md.
KINDS = ("no GPU", "one GPU", "several GPUs", "several nodes")


def cores():
    """Return how many logical cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor():
    """Return the name of the CPU, or its kind where the system does not say more."""
    try:
        names = re.findall(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def system():
    """Return the name of the operating system, with that of its kernel."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def accelerators():
    """Return how many accelerators of which kind torch sees, as text; "" if it sees none."""
    import torch  # here, because it takes seconds to load

    if not torch.accelerator.is_available():
        return ""
    kind = torch.accelerator.current_accelerator().type
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    counts = Counter(name(index) for index in range(torch.accelerator.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def seen_by_torch():
    """Return what torch sees here, as a dict; count is the number of GPUs that lessons can use."""
    import torch
    import torch.distributed as dist

    kind = getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    count = torch.accelerator.device_count()
    if kind == "mps" or (kind == "xpu" and not dist.is_xccl_available()):
        count = 0  # these have no collectives, and the lessons take the CPU
    machine = {"torch": torch.__version__, "count": count}
    if count:
        machine |= {"kind": kind, "backend": dist.get_default_backend_for_device(kind)}
        machine["name"] = torch.get_device_module(kind).get_device_name(0)
        machine["mask"] = "ZE_AFFINITY_MASK" if kind == "xpu" else "CUDA_VISIBLE_DEVICES"
        if torch.version.hip:
            machine["mask"] = "HIP_VISIBLE_DEVICES"
    if count and hasattr(torch._C, "_nccl_version"):
        machine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def look():
    """Return seen_by_torch(), asked of a child: this process takes no memory of a GPU.

    Raises ValueError with a sentence for the user if torch cannot be asked.
    """
    code = "import json; from course import machine; print(json.dumps(machine.seen_by_torch()))"
    job = processes.run(
        [sys.executable, "-c", code], 300, cwd=ROOT / "scripts", stderr=subprocess.PIPE
    )
    if job.trouble:
        reason = (job.errors.strip().splitlines() or [job.trouble])[-1]
        raise ValueError(f"This Python cannot ask torch which GPUs there are: {reason}")
    return json.loads(job.output.splitlines()[-1])


def nodes():
    """Return how many nodes the Slurm allocation has in which this is; 1 without one."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)


def kind_of(machine):
    """Return which of KINDS a machine is, from the dict in its record."""
    if machine.get("nodes", 1) > 1:
        return "several nodes"
    return KINDS[min(machine["count"], 2)]


def name_of(machine):
    """Return a name for the record of a machine, such as 2-cpu-cores or 2-nodes-4-nvidia-a100."""
    name = f"{machine['count']} {machine['name']}" if machine["count"] else ""
    name = name or f"{machine['cores']} CPU cores"
    if machine.get("nodes", 1) > 1:
        name = f"{machine['nodes']} nodes {name}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def release(package):
    """Return the version of a package, without what it was built for: 2.6.0+cu124 is 2.6.0."""
    return version(package).partition("+")[0]


def commit():
    """Return the commit of the repository, "" where there is no git or no repository."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=, changed"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def facts(command, began):
    """Return what a command ran on, when and how, as {name: text}; began in seconds as time."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    begin, end = (time.localtime(x) for x in (began, time.time()))
    every = {
        "command": command,
        "when": f"{time.strftime('%Y-%m-%d %H:%M', begin)} to {time.strftime('%H:%M %Z', end)}",
        "commit": commit(),
        "system": system(),
        "CPU": f"{processor()}, {cores()} logical cores",
        "memory": f"{memory:.1f} GB",
        "accelerators": accelerators() or "none",
        "Slurm nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "torchvision": version("torchvision"),
    }
    return {name: text for name, text in every.items() if text}


def described(gpus, *more):
    """Return one line on this machine; gpus is text, "" for none, and more is what else to say."""
    words = [
        platform.system(),
        f"{cores()} CPU cores",
        gpus or "no GPU",
        f"Python {platform.python_version()}",
        f"torch {release('torch')}",
        *more,
    ]
    return ", ".join(words)


def recorded(command, *more):
    """Return one line on where and when a command was recorded; more is what else to say."""
    words = described(accelerators(), *more)
    return f"Recorded on {time.strftime('%Y-%m-%d')} with `{command}`: {words}.\n"
