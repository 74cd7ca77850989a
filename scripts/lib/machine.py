"""What something ran on, for whoever reads the numbers later."""

import os
import platform
import re
import subprocess
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from lib.course import ROOT


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


def recorded(command, *more):
    """Return one line on where and when a command was recorded; more is what else to say."""
    words = [
        platform.system(),
        f"{cores()} CPU cores",
        accelerators() or "no GPU",
        f"Python {platform.python_version()}",
        f"torch {release('torch')}",
        *more,
    ]
    return f"Recorded on {time.strftime('%Y-%m-%d')} with `{command}`: {', '.join(words)}.\n"
