"""Be one rank of the doctor: print what it finds, as lines of JSON. Started by doctor.sh.

Usage: probe.py FILE [--simulated]   doctor.sh has written FILE into this folder

First it prints what it finds on its machine, then how it met the other ranks. A check is [what is
fine, what is wrong and what to do, what to do where others find a different value]; the last two
are "" where that's no fault. No error stops it, since the launcher would then stop the other ranks.
"""

import contextlib
import importlib
import json
import os
import platform
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
from launcher.gpus import has_gpus

SHM = 32 * 2**20  # bytes of /dev/shm for each rank
SECONDS = 20  # to wait for the other ranks, and again for an all_reduce
MNIST = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
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


def emit(**checks):
    """Print each check as a line of its own: srun mixes lines of ranks beyond 1,024 bytes."""
    for name, found in checks.items():
        line = json.dumps({"rank": RANK, "node": NODE, "checks": {name: found}})
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def find_checks(token):
    """Return the checks of this rank's machine, and others that later answers replace."""
    found, backend, wrong = find_gpus()
    slow = ", slow: there are fewer GPUs than ranks" if found and backend == "gloo" else ""
    return {
        "CPUs": ["enough for the threads of each rank", check_cpus(), ""],
        "shared files": ["every node sees this folder", check_files(token), ""],
        "data": ["MNIST is on every node", check_data(), ""],
        "/dev/shm": ["enough room on every node", check_shm(), ""],
        "Python": [platform.python_version(), "", "Use one environment for all nodes"],
        **check_packages(),
        "GPUs": [f"{found} on a node" if found else "none, the ranks use the CPU", wrong, ""],
        "backend": [backend + slow, "", "Ask for as many GPUs on each node"],
        "rendezvous": ["", "a rank there said nothing more", ""],
        "all_reduce": ["", "a rank there said nothing more", ""],
    }


# What the rank finds. Most functions return what is wrong and what to do, or "".


def check_packages():
    """Return a check of each package's version. Only torch is imported, which takes long enough."""
    checks = {}
    todo = "Use one environment for all nodes, on a disk they share, with all of requirements.txt"
    for name, oldest in read_requirements().items():
        version = problem = ""
        try:
            version = metadata.version(name)
            if name == "torch":
                importlib.import_module(name)
            if is_older(version, oldest):
                problem = f"too old ({version}, not {oldest}). {todo}"
        except Exception as error:  # whatever a broken package raises
            words = (str(error).strip().splitlines() or [""])[-1]
            problem = f"not usable ({type(error).__name__}: {words}). {todo}"
        checks[name] = [version, problem, todo]
    return checks


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
    raw = ROOT / "data" / "MNIST" / "raw"
    missing = [name for name in MNIST if not (raw / f"{name}-ubyte").is_file()]
    todo = "Restore MNIST in the folder of the course: git checkout data/MNIST"
    return f"missing: {', '.join(missing)}. {todo}" if missing else ""


def check_shm():
    """Check that /dev/shm has room: data loaders and NCCL exchange data there."""
    wanted = SHM * LOCAL_WORLD_SIZE
    if not Path("/dev/shm").is_dir() or shutil.disk_usage("/dev/shm").free >= wanted:
        return ""
    todo = "Remove files there; in a container, use --shm-size=1g"
    return f"less than {wanted / 2**20:,.0f} MB free. {todo}"


def find_gpus():
    """Return how many GPUs torch sees, the lessons' backend, and what is wrong."""
    count, backend, wrong = 0, "", ""
    with contextlib.suppress(Exception):  # a torch that is missing or too old is named anyway
        import torch

        backend = choose_device()[1]
        count = torch.accelerator.device_count()
        built = any(getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu"))
        if not count and has_gpus() and built:
            todo = "Ask for them: --gpus-per-node. If you did, see nvidia-smi: is its driver old?"
            wrong = f"torch sees no GPU, though there are some. {todo} and day2/SITES.md"
        elif not count and has_gpus():
            todo = "Install those for GPUs: https://pytorch.org/get-started/locally/"
            wrong = f"torch {torch.__version__} is for CPUs only, but there are GPUs. {todo}"
    return count, backend, wrong


def choose_device():
    """Return the device and the backend that the lessons choose for this rank."""
    lesson = runpy.run_path(str(ROOT / "day2" / "9_torch_dist_multi_node.py"))
    return lesson["choose_device"](LOCAL_RANK, LOCAL_WORLD_SIZE)


def meet():
    """Meet the other ranks, and do an all_reduce with them. Emit how each of the two went."""
    try:  # a wrong /etc/hosts shows here
        address = socket.getaddrinfo(MASTER, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        address = error.strerror
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or "not chosen"
    where = f"{MASTER} is {address} there, and the interface is {chosen} (of {interfaces})"
    step, todo = "rendezvous", "Look at /etc/hosts there, the firewall, the interface, MASTER_PORT"
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
        emit(rendezvous=[f"{WORLD_SIZE} ranks have met", "", ""])
        # The ranks choose new ports for it.
        step, todo = "all_reduce", "Open all ports between the nodes, or set GLOO_SOCKET_IFNAME"
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
        emit(all_reduce=[f"4 MB at {speed:,.0f} MB/s, {backend}, {device.type}", "", ""])
        time.sleep(0.2)  # others may not be done yet
    except Exception as error:  # whatever torch raises
        words = str(error).strip().partition("\n")[0].rstrip(".")
        emit(**{step: ["", f"{words}. {where}. {todo}", ""]})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what goes wrong is raised, too
    emit(**find_checks(sys.argv[1]))
    meet()
    os._exit(0)  # without waiting for the threads of a process group
