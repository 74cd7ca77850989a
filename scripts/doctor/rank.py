"""Be one rank of the doctor: print lines of JSON with what there is here. Started by doctor.sh.

Usage: rank.py FILE [--imitated]   the command has written FILE into this folder

First it prints what it finds on its machine, then how it met the other ranks, then what else can be
imported. Nothing that goes wrong ends it: the launcher would end the others.
"""

import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import resource
import runpy
import shutil
import signal
import socket
import sys
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20  # to wait for the other ranks, and again for an all_reduce
NUMBERS, TIMES = 1_000_000, 5  # in one all_reduce, 4 bytes each; how many of them
MASKS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"


def number(variable):
    """Return the number in a variable of the environment, 0 if there is none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else 0


RANK, LOCAL_RANK = number("RANK"), number("LOCAL_RANK")
WORLD_SIZE, LOCAL_WORLD_SIZE = number("WORLD_SIZE") or 1, number("LOCAL_WORLD_SIZE") or 1
MASTER = os.environ.get("MASTER_ADDR", "")
IMITATED = "--imitated" in sys.argv
NODE = os.environ.get("SLURMD_NODENAME", socket.gethostname())
if IMITATED:
    NODE = f"imitated node {RANK // LOCAL_WORLD_SIZE}"


def tell(**facts):
    """Print facts as a line, in one piece: several ranks may print at the same time."""
    sys.stdout.write(json.dumps({"rank": RANK, "node": NODE, **facts}) + "\n")
    sys.stdout.flush()


def read_requirements():
    """Return what requirements.txt asks of this Python, {distribution: oldest version or ""}."""
    needed = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        requirement, _, marker = line.partition("#")[0].partition(";")
        before = re.search(r'python_version < "3\.(\d+)"', marker)
        if requirement.strip() and not (before and sys.version_info >= (3, int(before[1]))):
            name, _, oldest = requirement.strip().partition(">=")
            needed[name] = oldest
    return needed


def import_all(names):
    """Import packages of requirements.txt. Return their versions, or why there is none."""
    versions = {}
    for name in names:
        try:
            module = importlib.import_module(name.replace("-", "_"))
            # What torch says itself tells more: which CUDA it was built for.
            torch = name in ("torch", "torchvision")
            versions[name] = module.__version__ if torch else metadata.version(name)
        except Exception as error:  # whatever a broken package raises
            words = (str(error).strip().splitlines() or [""])[-1]
            versions[name] = f"not usable ({type(error).__name__}: {words})"
    return versions


# What there is.


def find_facts(token):
    """Return what there is on this machine, as table.py reads it."""
    return {
        "ranks": WORLD_SIZE,
        "local_rank": LOCAL_RANK,
        "local_ranks": LOCAL_WORLD_SIZE,
        "several_hosts": not IMITATED and WORLD_SIZE > LOCAL_WORLD_SIZE,
        "needed": {"Python": "3.11", **read_requirements()},
        "versions": {"Python": platform.python_version(), **import_all(["torch"])},
        "has_gpus": has_gpus(),
        "hidden": any(os.environ.get(name) in ("", "-1") for name in MASKS),
        **find_gpus(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpus_of_node": os.cpu_count(),
        "cpus_asked": 0 if IMITATED else number("SLURM_CPUS_PER_TASK"),
        "threads": number("OMP_NUM_THREADS"),
        "folder": str(Path.cwd()),
        "writes": os.access(".", os.W_OK),
        "shares": Path(token).exists(),
        "damaged": damaged_files(),
        "shm": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "lockable": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],  # bytes; -1: no limit
    }


def find_gpus():
    """Return whether torch is built for GPUs, their ids, and the backend that the lessons take."""
    facts = {"built": True, "gpus": [], "backend": ""}
    with contextlib.suppress(Exception):  # a torch that is missing or too old is named anyway
        import torch

        kinds = ("cuda", "hip", "xpu")
        facts["built"] = any(getattr(torch.version, kind, None) for kind in kinds)
        facts["backend"] = choose_device()[1]
        count = torch.accelerator.device_count()
        kind = torch.accelerator.current_accelerator().type if count else "cpu"
        if kind not in ("cpu", "mps"):  # the lessons do not use Apple's
            properties = torch.get_device_module(kind).get_device_properties
            mask = ",".join(os.environ.get(name, "") for name in MASKS)
            facts["gpus"] = [
                str(getattr(properties(i), "uuid", f"{mask} {i}")) for i in range(count)
            ]
    return facts


def choose_device():
    """Return the device and the backend that the lessons choose for this rank."""
    lesson = runpy.run_path(str(ROOT / "day2" / "9_torch_dist_multi_node.py"))
    return lesson["choose_device"](LOCAL_RANK, LOCAL_WORLD_SIZE)


def has_gpus(root=Path("/")):
    """Return whether this machine has a GPU to compute with, whatever torch can do with it.

    Of Intel's, the class 0x0380 is that of computing centres. A PC's may only show a picture.
    """
    for name in ("nvidia[0-9]*", "kfd", "dxg"):  # of NVIDIA, of AMD, of WSL2
        if any((root / "dev").glob(name)):
            return True
    for card in (root / "sys" / "class" / "drm").glob("render*/device"):
        with contextlib.suppress(OSError):
            vendor = (card / "vendor").read_text().strip()
            if vendor == "0x8086" and (card / "class").read_text().startswith("0x0380"):
                return True
    return False


def damaged_files():
    """Return the names of the files of MNIST that are not there as data/README.md lists them."""
    table = (ROOT / "data" / "README.md").read_text()
    damaged = []
    for name, md5 in re.findall(r"^\| (\S+-ubyte) \|.*\| (\w{32}) \|$", table, re.M):
        with contextlib.suppress(OSError):
            content = (ROOT / "data" / "MNIST" / "raw" / name).read_bytes()
            if hashlib.md5(content, usedforsecurity=False).hexdigest() == md5:
                continue
        damaged.append(name)
    return damaged


# The meeting.


def meet():
    """Return how the meeting with the other ranks went, as table.py reads it."""
    facts = {"met": False, "where": where()}
    try:
        import torch
        import torch.distributed as dist

        device, backend = choose_device()
        torch.zeros(1, device=device)  # makes a GPU's context, which can take many seconds
        timeout = timedelta(seconds=SECONDS)
        store = dist.TCPStore(MASTER, number("MASTER_PORT"), WORLD_SIZE, RANK == 0, timeout)
        facts["met"] = True
        own = None if backend == "gloo" else device
        options = {"rank": RANK, "world_size": WORLD_SIZE, "timeout": timeout, "device_id": own}
        dist.init_process_group(backend, store=store, **options)
        facts.update(reduce_all(torch, device))
        facts["speed"] += f", {backend}, {device.type}"
        time.sleep(0.2)  # as in the lessons: gloo's threads come to an end first
        dist.destroy_process_group()
    except Exception as error:  # whatever torch raises
        facts["error"] = str(error).strip().partition("\n")[0].rstrip(".")
    return facts


def where():
    """Return in words where this rank looks for the others: a wrong /etc/hosts shows here."""
    try:
        address = socket.getaddrinfo(MASTER, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        address = error.strerror
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or "not chosen"
    return f"{MASTER} is {address} there, the interface {chosen} (of {interfaces})"


def reduce_all(torch, device):
    """Repeat an all_reduce. Return the clock after the first, and how fast the others were."""
    tensor = torch.full((NUMBERS,), float(RANK), device=device)
    torch.distributed.all_reduce(tensor)  # sets up connections: not timed
    if tensor[0].item() != sum(range(WORLD_SIZE)):
        raise RuntimeError("the sum is wrong")
    clock, begin = time.time(), time.perf_counter()
    for _ in range(TIMES):
        torch.distributed.all_reduce(tensor)
    tensor[0].item()  # waits until a GPU is done
    seconds = time.perf_counter() - begin
    speed = f"{NUMBERS * 4 * TIMES / seconds / 1e6:,.0f} MB/s"
    return {"clock": clock, "speed": f"{TIMES} times 4 MB in {seconds:.2f} s, {speed}"}


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what goes wrong is raised, too
    tell(**find_facts(sys.argv[1]))
    tell(**meet())
    if LOCAL_RANK == 0:  # imports take long, so one rank of a node does these
        tell(others=import_all(read_requirements()))
    os._exit(0)  # without waiting for the threads of a broken process group
