"""Be one rank of the doctor: print what it finds, as lines of JSON. Started by doctor.sh.

Usage: probe.py FILE [--simulated]   doctor.sh has written FILE into this folder

First it prints what it finds on its machine, then how it met the other ranks, then which other
packages can be imported. No error stops it, because the launcher would then stop the other ranks.
"""

import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import runpy
import shutil
import signal
import socket
import sys
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages beside this one

from catalog import ROOT, is_older, read_requirements
from launcher import gpus

SHM = 32 * 2**20  # bytes of /dev/shm for each rank
SECONDS = 20  # to wait for the other ranks, and again for an all_reduce
NUMBERS = 1_000_000  # in an all_reduce, 4 bytes each


def number(variable, default=0):
    """Return the number in a variable of the environment."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else default


RANK, LOCAL_RANK = number("RANK"), number("LOCAL_RANK")
WORLD_SIZE, LOCAL_WORLD_SIZE = number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1)
MASTER = os.environ.get("MASTER_ADDR", "")
SIMULATED = "--simulated" in sys.argv
NODE = os.environ.get("SLURMD_NODENAME", socket.gethostname())
if SIMULATED:
    NODE = f"simulated node {RANK // LOCAL_WORLD_SIZE}"


def emit(**facts):
    """Print facts as a line, in one piece: several ranks may print at the same time."""
    sys.stdout.write(json.dumps({"rank": RANK, "node": NODE, **facts}) + "\n")
    sys.stdout.flush()


def find_versions(names):
    """Import packages of requirements.txt. Return their versions, or why they are not usable."""
    versions = {"Python": platform.python_version()}
    needed = read_requirements()
    for name in names:
        try:
            module = importlib.import_module(name.replace("-", "_"))
            # torch's own version says more: which CUDA it was built for.
            torch = name in ("torch", "torchvision")
            version = module.__version__ if torch else metadata.version(name)
            old = is_older(version, needed[name])
            versions[name] = f"too old ({version}, not {needed[name]})" if old else version
        except Exception as error:  # whatever a broken package raises
            words = (str(error).strip().splitlines() or [""])[-1]
            versions[name] = f"not usable ({type(error).__name__}: {words})"
    return versions


# What the rank finds. A check returns what is wrong and what to do, or "".


def find_facts(token):
    """Return what the rank finds on its machine, as table.py reads it."""
    checks = {
        "CPUs": ("enough for the threads of each rank", check_cpus()),
        "shared files": ("every node sees this folder", check_files(token)),
        "data": ("MNIST is on every node", check_data()),
        "/dev/shm": ("enough room on every node", check_shm()),
    }
    return {
        "local_rank": LOCAL_RANK,
        "busy": os.getloadavg()[0] > os.cpu_count() / 2,  # on average, in the last minute
        "checks": checks,
        "versions": find_versions(["torch"]),
        "has_gpus": gpus.has_gpus(),
        **find_gpus(),
    }


def check_cpus():
    have, threads = len(os.sched_getaffinity(0)), number("OMP_NUM_THREADS")
    asked = 0 if SIMULATED else min(number("SLURM_CPUS_PER_TASK"), os.cpu_count())
    if have < asked:
        return f"{have}, although you asked for {asked}. See --cpu-bind and SLURM_CPU_BIND"
    if threads > have:
        return f"{have} for {threads} threads, which take turns: unset OMP_NUM_THREADS"
    return ""


def check_files(token):
    if not os.access(".", os.W_OK):
        return f"you cannot write to {Path.cwd()}. Go to a folder where you can, with cd"
    if not Path(token).exists():
        todo = "Go to a folder on the file system that all nodes share, with cd"
        return f"files in {Path.cwd()} are not seen. {todo}"
    return ""


def check_data():
    table = (ROOT / "data" / "README.md").read_text()
    damaged = []
    for name, md5 in re.findall(r"^\| (\S+-ubyte) \|.*\| (\w{32}) \|$", table, re.M):
        file = ROOT / "data" / "MNIST" / "raw" / name
        content = b""
        with contextlib.suppress(OSError):
            content = file.read_bytes()
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            damaged.append(name)
    todo = "Restore MNIST in the folder of the course: git checkout data/MNIST"
    return f"missing or damaged: {', '.join(damaged)}. {todo}" if damaged else ""


def check_shm():
    """Check that /dev/shm has room: data loaders and NCCL exchange data there."""
    wanted = SHM * LOCAL_WORLD_SIZE
    if not Path("/dev/shm").is_dir() or shutil.disk_usage("/dev/shm").free >= wanted:
        return ""
    todo = "Remove files there; in a container, use --shm-size=1g"
    return f"less than {wanted / 2**20:,.0f} MB free. {todo}"


def find_gpus():
    """Return whether torch is built for GPUs, their ids, and the backend that the lessons take."""
    facts = {"built": True, "gpus": [], "backend": ""}
    with contextlib.suppress(Exception):  # a torch that is missing or too old is named anyway
        import torch

        kinds = ("cuda", "hip", "xpu")
        facts["built"] = any(getattr(torch.version, kind, None) for kind in kinds)
        facts["backend"] = choose_device()[1]
        _, names = gpus.name_gpus(torch)
        if names:  # a mask may call different GPUs the same
            kind = torch.accelerator.current_accelerator().type
            properties = torch.get_device_module(kind).get_device_properties
            ids = [getattr(properties(i), "uuid", name) for i, name in enumerate(names)]
            facts["gpus"] = [str(uuid) for uuid in ids]
    return facts


def choose_device():
    """Return the device and the backend that the lessons choose for this rank."""
    lesson = runpy.run_path(str(ROOT / "day2" / "9_torch_dist_multi_node.py"))
    return lesson["choose_device"](LOCAL_RANK, LOCAL_WORLD_SIZE)


def rendezvous():
    """Return how the rendezvous with the other ranks went, as table.py reads it."""
    try:  # a wrong /etc/hosts shows here
        address = socket.getaddrinfo(MASTER, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        address = error.strerror
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or "not chosen"
    where = f"{MASTER} is {address} there, and the interface is {chosen} (of {interfaces})"
    facts = {"met": False, "where": where}
    try:
        import torch
        import torch.distributed as dist

        device, backend = choose_device()
        torch.zeros(1, device=device)  # makes a GPU's context, which can take many seconds
        timeout = timedelta(seconds=SECONDS)
        store, _, _ = next(dist.rendezvous("env://", RANK, WORLD_SIZE, timeout=timeout))
        store.set(f"rank {RANK}", "here")
        if RANK == 0:
            store.wait([f"rank {rank}" for rank in range(WORLD_SIZE)], timeout)
        facts["met"] = True
        emit(**facts)  # what follows may take too long
        own = None if backend == "gloo" else device
        options = {"rank": RANK, "world_size": WORLD_SIZE, "timeout": timeout, "device_id": own}
        dist.init_process_group(backend, store=store, **options)
        tensor = torch.full((NUMBERS,), float(RANK), device=device)
        dist.all_reduce(tensor)  # sets up connections: not timed
        if tensor[0].item() != sum(range(WORLD_SIZE)):
            raise RuntimeError("the sum is wrong")
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits until a GPU is done
        speed = NUMBERS * 4 / (time.perf_counter() - begin) / 1e6
        facts["speed"] = f"4 MB at {speed:,.0f} MB/s, {backend}, {device.type}"
        time.sleep(0.2)  # as in the lessons: gloo's threads come to an end first
        dist.destroy_process_group()
    except Exception as error:  # whatever torch raises
        facts["error"] = str(error).strip().partition("\n")[0].rstrip(".")
    return facts


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what goes wrong is raised, too
    emit(**find_facts(sys.argv[1]))
    emit(**rendezvous())
    if LOCAL_RANK == 0:  # imports take long, so one rank of a node does these
        emit(versions=find_versions(read_requirements()))
    os._exit(0)  # without waiting for the threads of a broken process group
