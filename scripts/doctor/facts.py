"""What doctor.py finds out on one rank.

Each rank finds the facts of its node with Python's standard library alone. What needs torch is done
by a child of it, so that a torch that is missing, crashes or hangs is one of the facts.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import queue
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

from course.environment import ROOT, read_requirements  # which any Python 3 can import
from launcher.gpus import has_gpus, hidden_by_mask, name_gpus


def number(variable):
    """Return the number in a variable of the environment, 0 if there is none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else 0


START = time.monotonic()
# Until when, in seconds after the start: ranks connect, torch is imported (it can be slow where
# many do it at once), rank 0 has the facts, rank 0 has answered.
CONNECTED, IMPORTED, TOLD, ANSWERED = 15, 45, 47, 50
REDUCED = 20  # seconds that all about the all_reduce may take
RANK, LOCAL_RANK = number("RANK"), number("LOCAL_RANK")
WORLD_SIZE, LOCAL_WORLD_SIZE = number("WORLD_SIZE") or 1, number("LOCAL_WORLD_SIZE") or 1
MASTER, PORT = os.environ.get("MASTER_ADDR", ""), number("MASTER_PORT")
JOB = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
IMITATED = "--imitated" in sys.argv  # nodes, by the launcher's --local
NODE = os.environ.get("SLURMD_NODENAME", socket.gethostname())
if IMITATED:
    NODE = f"imitated node {RANK // LOCAL_WORLD_SIZE}"
TOKEN = Path(f".doctor-{JOB}-{PORT}")  # in the folder where lessons will write

NEEDED = read_requirements(ROOT / "requirements.txt")
FIRST = ["torch", "torchvision"]
OTHERS = [name for name in NEEDED if name not in FIRST]
# Imports take long, so one rank of a node does those that only tell what there is.
PACKAGES = ["torch"] if LOCAL_RANK else FIRST + OTHERS
MNIST = {  # as in data/README.md
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
NUMBERS = 1_000_000  # in one all_reduce, 4 bytes each


def left(until):
    """Return how many seconds are left until that many seconds after the start; 0.1 if none."""
    return max(0.1, START + until - time.monotonic())


def last_line(text):
    """Return the last line of a text, without blanks around it."""
    return (str(text).strip().splitlines() or [""])[-1].strip()


def be_the_child():
    """Print facts as lines of JSON as they are found; then, when told "go", do the all_reduce."""
    signal.alarm(ANSWERED + 5)  # ends this process should all else be stuck
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = import_package(name)
        except Exception as error:  # whatever a broken package raises
            versions[name] = f"not usable ({type(error).__name__}: {last_line(error)})"
        tell(versions=versions)
    gpus, backend, built = [], "", True
    with contextlib.suppress(Exception):  # a torch too old for this is reported anyway
        built = built_for_gpus()
        gpus = find_gpus()
        if gpus:
            use_gpu()  # what is wrong with it is said by the all_reduce
            backend = choose_device()[1]
    tell(gpus=gpus, backend=backend, built=built)
    if sys.stdin.readline() == "go\n":
        signal.alarm(REDUCED + 5)
        try:
            tell(reduced=reduce_for_a_while())
        except Exception as error:
            tell(error=last_line(error))
            os._exit(1)  # without waiting for the threads of a broken process group


def import_package(name):
    """Import a package of requirements.txt and return its version. Raises what it raises."""
    module = importlib.import_module(name.replace("-", "_"))
    # What torch says itself tells more: which CUDA it was built for.
    return module.__version__ if name in FIRST else metadata.version(name)


def tell(**facts):
    """Print facts for the parent."""
    print(json.dumps(facts), flush=True)


def find_gpus():
    """Return the ids of the accelerators that torch sees here, as a list of strings."""
    import torch

    _, names = name_gpus(torch)
    if not names:
        return []
    kind = torch.accelerator.current_accelerator().type
    properties = torch.get_device_module(kind).get_device_properties
    return [str(getattr(properties(i), "uuid", name)) for i, name in enumerate(names)]


def built_for_gpus():
    """Return whether this torch can use any kind of GPU: one for CPUs only cannot."""
    import torch

    return any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))


def use_gpu():
    """Allocate on this rank's GPU. The first use makes its context, which can take many seconds.

    So this is done in the time for imports, and not in that for the all_reduce.
    """
    import torch

    kind = torch.accelerator.current_accelerator().type
    index = LOCAL_RANK % torch.accelerator.device_count()
    torch.zeros(1, device=torch.device(kind, index))


def choose_device():
    """Return the device and the backend that the lessons choose for this rank."""
    lesson = runpy.run_path(str(ROOT / "day2" / "9_torch_dist_multi_node.py"))
    return lesson["choose_device"](LOCAL_RANK, LOCAL_WORLD_SIZE)


def reduce_for_a_while(seconds=2):
    """Repeat an all_reduce; return a line of text about it. Raises what torch raises."""
    import torch
    import torch.distributed as dist

    device, backend = choose_device()
    own = None if backend == "gloo" else device
    dist.init_process_group(backend, timeout=timedelta(seconds=REDUCED - 2), device_id=own)
    tensor = torch.zeros(NUMBERS, device=device)
    dist.all_reduce(tensor)  # the first call sets up connections: not timed
    count, elapsed, begin = 0, 0, time.perf_counter()
    while elapsed < seconds:
        for _ in range(5):
            dist.all_reduce(tensor)
        count += 5
        # All ranks must agree on when to stop. item() waits for a GPU to be done.
        tensor[0].item()
        longest = torch.tensor(time.perf_counter() - begin, device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        elapsed = longest.item()
    total = torch.tensor(RANK, device=device)
    dist.all_reduce(total)
    wrong = total.item() != sum(range(WORLD_SIZE))
    time.sleep(0.2)  # as in the lessons: gloo's threads come to an end first
    dist.destroy_process_group()
    if wrong:
        raise RuntimeError("the sum is wrong")
    rate = NUMBERS * 4 * count / elapsed / 1e6
    return f"{count} times 4 MB in {elapsed:.1f} s, {rate:,.0f} MB/s, {backend}, {device.type}"


class Child:
    """The child as its parent sees it, which never waits for it without end."""

    def __init__(self):
        """Start it."""
        command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--child"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, text=True, errors="replace", **pipes)
        self.lines = queue.Queue()
        self.facts = {"versions": {}, "gpus": [], "backend": "", "built": True}
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """Put its lines into the queue; None is the end."""
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def hear(self, *keys, seconds):
        """Add what it tells to facts. Return "" once it tells one of the keys, else why not."""
        words, end = "", time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                return f"not done in {seconds:.0f} s"
            if line is None:
                return f"ended with status {self.process.wait()}: {words}"
            try:
                told = json.loads(line)
                self.facts.update(told)
            except (ValueError, TypeError):
                words = last_line(line) or words
            else:
                if any(key in told for key in keys):
                    return ""

    def go(self):
        """Let it do the all_reduce. Return the line about it, and why there is none."""
        with contextlib.suppress(OSError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        reason = self.hear("reduced", "error", seconds=REDUCED)
        return self.facts.get("reduced", ""), self.facts.get("error", reason)

    def end(self):
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


def find_facts(child):
    """Return the facts of this rank, as a dict for JSON."""
    reason = child.hear("gpus", seconds=left(IMPORTED))
    child.facts["versions"]["Python"] = platform.python_version()
    for name in PACKAGES:  # at the first of these it ended
        child.facts["versions"].setdefault(name, f"not usable (import {reason})")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    shm = Path("/dev/shm")
    return {
        **child.facts,
        "rank": RANK,
        "local_rank": LOCAL_RANK,
        "node": NODE,
        "host": socket.gethostname(),  # imitated nodes share it
        "has_gpus": has_gpus(),
        "hidden": hidden_by_mask(),
        "interface": interface,
        "addresses": [find_address(name) for name in interface.split(",") if name],
        "interfaces": [name for _, name in socket.if_nameindex() if find_address(name)],
        "cpus": sorted(os.sched_getaffinity(0)),
        "cpus_of_node": os.cpu_count(),
        "cpus_asked": 0 if IMITATED else number("SLURM_CPUS_PER_TASK"),
        "threads": number("OMP_NUM_THREADS"),
        "shm": shutil.disk_usage(shm).free if shm.is_dir() else None,
        "infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "lockable": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "damaged": damaged_files(),
        "h5": (ROOT / "data" / "mnist.h5").exists(),
        "folder": str(Path.cwd()),
        "token": read_token(),
    }


def find_address(interface):
    """Return the IPv4 address of a network interface, else that it has IPv6, else nothing."""
    with socket.socket() as any_socket, contextlib.suppress(OSError):
        request = interface.encode()[:15].ljust(40, b"\0")
        return socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])  # SIOCGIFADDR
    with contextlib.suppress(OSError):
        if interface in Path("/proc/net/if_inet6").read_text().split():
            return "IPv6"
    return ""


def damaged_files():
    """Return the names of the files of MNIST that are not there as they should be."""
    damaged = []
    for name, md5 in MNIST.items():
        file = ROOT / "data" / "MNIST" / "raw" / name
        with contextlib.suppress(OSError):
            if hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() == md5:
                continue
        damaged.append(name)
    return damaged


def read_token():
    """Return what rank 0 wrote, or None. A shared file may take a moment to be seen."""
    for _ in range(8):
        with contextlib.suppress(OSError):
            return TOKEN.read_text()
        time.sleep(0.25)
    return None
