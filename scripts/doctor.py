"""Checks, as every rank of a job, whether lessons can run. Started by scripts/doctor.sh.

Each rank finds the facts of its node with Python's standard library alone. What needs torch is
done by a child of it, so that a torch that is missing, crashes or hangs is one of the facts.
Rank 0 listens on MASTER_PORT, where the ranks of a lesson will meet. All ranks send it their
facts there. It prints one line a check and answers "go", for an all_reduce of 2 seconds, or
"stop". Every wait has an end.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import queue
import re
import runpy
import secrets
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

from environment import numbers, read_requirements


def number(variable):
    """Return the number in a variable of the environment, 0 if there is none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else 0


START = time.monotonic()
# Until when, in seconds after the start: ranks connect, torch is imported (it can be slow where
# many do it at once), rank 0 has the facts, rank 0 has answered.
CONNECTED, IMPORTED, TOLD, ANSWERED = 15, 45, 47, 50
REDUCED = 20  # seconds that all about the all_reduce may take
ROOT = Path(__file__).resolve().parents[1]
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
OLDEST = {"Python": (3, 11)} | {name: numbers(text) for name, text in NEEDED.items() if text}
MNIST = {  # as in data/README.md
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
SHM = 32 * 2**20  # bytes for each rank
GPU_FILES = ["nvidia[0-9]*", "kfd", "dxg"]  # in /dev: of NVIDIA, of AMD, of WSL2
NUMBERS = 1_000_000  # in one all_reduce, 4 bytes each


def left(until):
    """Return how many seconds are left until that many seconds after the start; 0.1 if none."""
    return max(0.1, START + until - time.monotonic())


def last_line(text):
    """Return the last line of a text, without blanks around it."""
    return (str(text).strip().splitlines() or [""])[-1].strip()


# ---------------------------------------------------------------- the child, which has torch


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
    gpus = []
    with contextlib.suppress(Exception):  # a torch too old for this is reported anyway
        gpus = find_gpus()
        if gpus:
            use_gpu()  # what is wrong with it is said by the all_reduce
    tell(gpus=gpus)
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

    kind = torch.accelerator.is_available() and torch.accelerator.current_accelerator().type
    if not kind or kind == "mps":
        return []
    properties = torch.get_device_module(kind).get_device_properties
    count = torch.accelerator.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not names[0]:
        names = [str(i) for i in range(count)]
    # A mask may name more than a process sees, such as several parts of a divided GPU (MIG).
    return [str(getattr(properties(i), "uuid", name)) for i, name in enumerate(names[:count])]


def use_gpu():
    """Allocate on this rank's GPU. The first use makes its context, which can take many seconds.

    So this is done in the time for imports, and not in that for the all_reduce.
    """
    import torch

    kind = torch.accelerator.current_accelerator().type
    index = LOCAL_RANK % torch.accelerator.device_count()
    torch.zeros(1, device=torch.device(kind, index))


def reduce_for_a_while(seconds=2):
    """Repeat an all_reduce; return a line of text about it. Raises what torch raises."""
    lesson = runpy.run_path(str(ROOT / "day2" / "9_torch_dist_multi_node.py"))
    import torch
    import torch.distributed as dist

    device, backend = lesson["choose_device"](LOCAL_RANK, LOCAL_WORLD_SIZE)
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
        command = [sys.executable, __file__, "--child"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, text=True, errors="replace", **pipes)
        self.lines = queue.Queue()
        self.facts = {"versions": {}, "gpus": []}
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


# ---------------------------------------------------------------- the facts of one rank


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
        "gpu_files": any(next(Path("/dev").glob(name), "") for name in GPU_FILES),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interface": interface,
        "addresses": [find_address(name) for name in interface.split(",") if name],
        "interfaces": [name for _, name in socket.if_nameindex() if find_address(name)],
        "cpus": sorted(os.sched_getaffinity(0)),
        "cpus_of_node": os.cpu_count(),
        "cpus_asked": 0 if IMITATED else number("SLURM_CPUS_PER_TASK"),
        "threads": number("OMP_NUM_THREADS"),
        "shm": shutil.disk_usage(shm).free if shm.is_dir() else None,
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


# ---------------------------------------------------------------- the meeting of the ranks


def resolve(name):
    """Return the addresses of a host. Raises OSError. In a thread: it can take minutes."""
    found = []

    def look():
        try:
            answers = socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)
            found.append([answer[4][0] for answer in answers])
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(left(CONNECTED))
    result = found[0] if found else TimeoutError("no answer")
    if isinstance(result, OSError):
        raise result
    return result


def connect():
    """Return a connection to rank 0. Raises ConnectionError that says why there is none."""
    while True:
        addresses = []
        try:
            addresses = resolve(MASTER)
            return socket.create_connection((MASTER, PORT), min(5, left(CONNECTED)))
        except OSError as error:
            if left(CONNECTED) <= 0.5:
                raise ConnectionError(why_not(addresses, error)) from None
        time.sleep(0.3)


def why_not(addresses, error):
    """Return in words why rank 0 was not reached, and what to do."""
    reason = last_line(error.strerror or error)
    if not addresses:
        todo = "Compare /etc/hosts and /etc/resolv.conf here with those of the other nodes"
        return f"the name {MASTER} cannot be resolved ({reason}). {todo}"
    text = f"{MASTER} is {addresses[0]} here, and port {PORT} there cannot be reached ({reason})"
    if addresses[0].startswith("127.") and addresses[0] != MASTER:
        return f"{text}. That is this node itself: correct its /etc/hosts"
    return f"{text}. Look at the firewall and at the interface that leads there"


def ask(child):
    """Send rank 0 the facts. Return its answer, or an empty string after saying why."""
    try:
        with connect() as connection:
            greeting = {"job": JOB, "rank": RANK, "node": NODE}
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            facts = json.dumps(find_facts(child)).encode()
            connection.settimeout(left(ANSWERED))
            connection.sendall(facts + b"\n")
            answer = connection.makefile().readline().strip()
        if not answer:
            raise ConnectionError(f"what listens on {MASTER}:{PORT} is not rank 0, or has ended")
        return answer
    except OSError as error:
        print(f"rank {RANK} on {NODE}: {last_line(error)}.")
        return ""


def listen():
    """Return the socket that the ranks will find at MASTER_ADDR and MASTER_PORT."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", PORT), family=family, dualstack_ipv6=both, backlog=WORLD_SIZE
        )
    except OSError as error:
        todo = "Choose another: export MASTER_PORT=29501"
        reason = os.strerror(error.errno)
        sys.exit(f"FAIL meeting point: port {PORT} on {NODE}: {reason}. {todo}")


def serve(listener):
    """Collect the facts, print the table, answer. Return how many checks failed."""
    greeted, nodes, everyone = {}, {}, []
    while len(greeted) < WORLD_SIZE and left(CONNECTED + 2) > 0.1:
        listener.settimeout(left(CONNECTED + 2))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection, _ = listener.accept()
            connection.settimeout(1)
            stream = connection.makefile()
            hello = json.loads(stream.readline(1000))
            if hello["job"] == JOB and hello["rank"] not in greeted:  # no rank of another job
                nodes[hello["rank"]] = hello["node"]
                greeted[hello["rank"]] = connection, stream
    listener.close()  # init_process_group listens here next
    for _, (connection, stream) in sorted(greeted.items()):
        connection.settimeout(left(TOLD))
        with contextlib.suppress(OSError, ValueError):
            everyone.append(json.loads(stream.readline()))
    TOKEN.unlink(missing_ok=True)
    table = [("meeting point", *check_meeting(nodes, everyone))]
    table += [(name, *check(everyone)) for name, check in CHECKS.items()] if everyone else []
    for name, fine, problem in table:
        print(f"FAIL {name}: {problem}" if problem else f"ok   {name}: {fine}")
    failed = sum(bool(problem) for _, _, problem in table)
    for connection, _ in greeted.values():
        with contextlib.suppress(OSError):
            connection.sendall(b"stop\n" if failed else b"go\n")
    return failed


# ---------------------------------------------------------------- the checks
# Each gets the facts of all ranks and returns two texts: what is fine, and what is not.


def some(names):
    """Return names as text, each once, and of many only the first."""
    names = [*dict.fromkeys(map(str, names))]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def on(everyone):
    """Return "on" and the nodes of these facts."""
    return "on " + some(facts["node"] for facts in everyone)


def grouped(everyone, key):
    """Return {value: [facts, ...]} where key(facts) is that value."""
    groups = {}
    for facts in everyone:
        groups.setdefault(key(facts), []).append(facts)
    return groups


def expected_nodes():
    """Return {rank: its node}, as the launcher fills the nodes; {} if that is unknown."""
    if IMITATED:
        return {rank: f"imitated node {rank // LOCAL_WORLD_SIZE}" for rank in range(WORLD_SIZE)}
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 4(x2),3
    counts = [
        int(count)
        for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(int(nodes or 1))
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=2)
        nodes = zip(done.stdout.split(), counts, strict=False)
        return dict(enumerate(node for node, count in nodes for _ in range(count)))
    return {}


def check_meeting(nodes, everyone):
    """Check that all ranks came, of which nodes has the node, and told their facts."""
    absent = [rank for rank in range(WORLD_SIZE) if rank not in nodes]
    silent = sorted(set(nodes) - {facts["rank"] for facts in everyone})
    problems = []
    if absent:
        expected = expected_nodes()
        hosts = some(expected.get(rank, "unknown") for rank in absent)
        todo = "There, look at /etc/hosts, the firewall and the interface, and what it says itself"
        problems.append(f"rank {some(absent)} ({hosts}) did not come in {CONNECTED} s. {todo}")
    if silent:
        hosts = some(nodes[rank] for rank in silent)
        problems.append(f"rank {some(silent)} ({hosts}) came, and said no more. Try again")
    return f"{len(nodes)} ranks reached {MASTER}:{PORT}", "; ".join(problems)


def check_version(name, everyone):
    """Check that Python or a package can be used, is new enough and the same on all nodes."""
    groups = grouped(everyone, lambda f: f["versions"].get(name))
    groups.pop(None, None)  # ranks that did not look
    text = "; ".join(f"{version} {on(group)}" for version, group in groups.items())
    for version in groups:
        if not version[:1].isdigit():
            todo = "Use one environment for all nodes, with all of requirements.txt"
            return "", f"{text}. {todo}. If it was only slow, try again"
        oldest = OLDEST.get(name, ())
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
            return "", f"{text}. Version {'.'.join(map(str, oldest))} or newer is needed"
    if len(groups) > 1:
        return "", f"{text}. Use one environment for all nodes, on a file system they share"
    return f"{''.join(groups)} on every node", "" if groups else "nobody looked. Try again"


def check_others(everyone):
    """Check the other packages of requirements.txt, which only some lessons need."""
    problems = {name: check_version(name, everyone)[1] for name in OTHERS}
    bad = [name for name in OTHERS if problems[name]]
    if bad:
        also = f" Likewise: {', '.join(bad[1:])}" if bad[1:] else ""
        return "", f"{bad[0]} {problems[bad[0]]}.{also}"
    versions = {name: text for f in everyone for name, text in f["versions"].items()}
    found = ", ".join(f"{name} {versions[name]}" for name in OTHERS)
    return f"{found}, the same on every node", ""


def check_gpus(everyone):
    """Check that nodes have as many GPUs as each other or as ranks, a different one for each."""
    blind = [
        f for f in everyone if f["gpu_files"] and not f["gpus"] and f["visible"] not in ("", "-1")
    ]
    if blind:
        todo = "Ask for them (--gpus-per-node); if you did, this torch was built without them"
        return "", f"torch sees none {on(blind)}, which has some. {todo}"
    counts, shared, even = {}, "", True
    for group in grouped(everyone, lambda f: f["node"]).values():
        seen = {gpu for f in group for gpu in f["gpus"]}
        used = [f["gpus"][f["local_rank"] % len(f["gpus"])] for f in group if f["gpus"]]
        counts.setdefault(len(seen), []).extend(group)
        if len(set(used)) < min(len(used), len(seen)):
            text = f"ranks {some(f['rank'] for f in group)} {on(group)} use only {some(used)}"
            return "", f"{text}. Let each see all of its node: --gpus-per-node alone"
        even = even and len(used) == len(seen) == len(group)
        if len(used) > len(seen):
            shared = f", shared by {len(used)} ranks through gloo: slow"
    if len(counts) > 1:
        text = "; ".join(f"{count} {on(group)}" for count, group in counts.items())
        if even:
            return f"{text}, a different one for each rank", ""
        return "", f"{text}. Ask for as many on each node: --gpus-per-node"
    count = next(iter(counts))
    fine = f"{count} on each node{shared or ', a different one for each rank'}"
    return fine if count else "none, the ranks use the CPU", ""


def check_interface(everyone):
    """Check that the interface through which the ranks talk exists, and leads to other nodes."""
    several = len({f["host"] for f in everyone}) > 1
    for f in everyone:
        inside = several and any(address.startswith("127.") for address in f["addresses"])
        if inside or "" in f["addresses"]:
            what = "does not lead to other nodes" if inside else "has no address"
            choice = some(name for name in f["interfaces"] if name != "lo") or "none there"
            todo = f"Choose one that does: export GLOO_SOCKET_IFNAME=... ({choice})"
            return "", f"{f['interface']} {what} {on([f])}. {todo}"
    names = some(f["interface"] or "not chosen" for f in everyone)
    return f"{names}, with an address on every node", ""


def check_cpus(everyone):
    """Check that the ranks of a node have the CPUs they asked for, and enough for their threads."""
    for group in grouped(everyone, lambda f: f["node"]).values():
        for f in group:
            have, asked = len(f["cpus"]), f["cpus_asked"]
            if have < min(asked, f["cpus_of_node"]):
                text = f"{have} for rank {f['rank']} {on([f])}, although it asked for {asked}"
                return "", f"{text}. Look for --cpu-bind and SLURM_CPU_BIND"
        cpus = len({cpu for f in group for cpu in f["cpus"]})
        threads = sum(f["threads"] for f in group)
        if threads > max(cpus, len(group)) or any(f["threads"] > len(f["cpus"]) for f in group):
            text = f"{cpus} for {len(group)} ranks with {threads} threads in all {on(group)}"
            return "", f"{text}. They take turns: unset OMP_NUM_THREADS"
    counts = some(f"{len(f['cpus'])} with {f['threads']} threads" for f in everyone)
    return f"each rank may use {counts}", ""


def check_files(everyone):
    """Check that all nodes see the file that rank 0 wrote into the current folder."""
    groups = grouped(everyone, lambda f: f["token"])
    folders = some(f["folder"] for f in everyone)
    if list(groups) == [None]:
        return "", f"rank 0 cannot write in {folders}. Go to a folder where you may: cd"
    if len(groups) > 1:
        apart = [f for group in list(groups.values())[1:] for f in group]
        todo = "Go to a folder on the file system that all nodes share: cd"
        return "", f"what rank 0 writes in {folders} is not seen {on(apart)}. {todo}"
    return f"every node sees {folders}", ""


def check_data(everyone):
    """Check the files of MNIST; data/mnist.h5 may still be to make."""
    bad = [f for f in everyone if f["damaged"]]
    if bad:
        names = some(name for f in bad for name in f["damaged"])
        todo = f"Restore it: cd {ROOT}; git checkout data/MNIST"
        return "", f"{names} missing or damaged {on(bad)}. {todo}"
    h5 = "mnist.h5 too" if all(f["h5"] for f in everyone) else "mnist.h5, for lesson 11, not yet"
    return f"MNIST is there on every node, {h5}", ""


def check_shm(everyone):
    """Check that /dev/shm has room: data loaders and NCCL exchange data there."""
    measured = [f for f in everyone if f["shm"] is not None]
    for group in grouped(measured, lambda f: f["node"]).values():
        free, wanted = min(f["shm"] for f in group), SHM * len(group)
        if free < wanted:
            text = f"{free / 2**20:,.0f} MB free {on(group)}, {wanted / 2**20:,.0f} are wanted"
            return "", f"{text}. Remove what lies there; in a container: --shm-size=1g"
    free = min((f["shm"] for f in measured), default=0)
    return f"{free / 2**20:,.0f} MB free", ""


CHECKS = {
    "Python": lambda everyone: check_version("Python", everyone),
    "torch": lambda everyone: check_version("torch", everyone),
    "torchvision": lambda everyone: check_version("torchvision", everyone),
    "other packages": check_others,
    "GPUs": check_gpus,
    "interface": check_interface,
    "CPUs": check_cpus,
    "shared files": check_files,
    "data": check_data,
    "/dev/shm": check_shm,
}


def stop(*_):
    """End at once, when a signal says so, and leave no file. The child ends by itself."""
    if RANK == 0:
        TOKEN.unlink(missing_ok=True)
    os._exit(1)


def main():
    """Be one rank; rank 0 is the meeting point as well."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    with contextlib.ExitStack() as stack:
        if RANK == 0:
            listener, result = listen(), queue.Queue()
            stack.callback(TOKEN.unlink, missing_ok=True)
            with contextlib.suppress(OSError):
                TOKEN.write_text(secrets.token_hex())
            meeting = threading.Thread(target=lambda: result.put(serve(listener)), daemon=True)
            meeting.start()
        child = Child()
        stack.callback(child.end)
        answer = ask(child)
        failed = result.get(timeout=left(ANSWERED)) if RANK == 0 else 0
        line, problem = child.go() if answer == "go" else ("", "")
    if RANK:
        if problem:
            print(f"rank {RANK} on {NODE}: all_reduce: {problem}.")
        return
    if problem:
        todo = "Ports besides MASTER_PORT must be open too; or choose another GLOO_SOCKET_IFNAME"
        print(f"FAIL all_reduce: {problem}. {todo}")
    elif line:
        print(f"ok   all_reduce: {line}")
    if line and not problem:
        print(f"=> ready: {len(CHECKS) + 2} checks ok, {WORLD_SIZE} ranks")
    else:
        print(f"=> not ready: {failed or 1} of {len(CHECKS) + 2} checks failed")


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        be_the_child()
    elif "RANK" not in os.environ:
        sys.exit("Start this with scripts/doctor.sh")
    else:
        main()
