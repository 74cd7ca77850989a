"""The checks of doctor.py.

Each gets the facts of all ranks and returns two texts: what is fine, and what is not.
"""

import contextlib
import os
import re
import resource
import subprocess

from doctor.facts import (
    CONNECTED,
    IMITATED,
    LOCAL_WORLD_SIZE,
    MASTER,
    NEEDED,
    OTHERS,
    PORT,
    WORLD_SIZE,
)
from course.environment import ROOT, numbers

OLDEST = {"Python": (3, 11)} | {name: numbers(text) for name, text in NEEDED.items() if text}
SHM = 32 * 2**20  # bytes for each rank
LOCKABLE = 2**30  # bytes that InfiniBand cards may keep in memory; NCCL's manual: without limit


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
    blind = [f for f in everyone if f["has_gpus"] and not f["gpus"] and not f["hidden"]]
    unfit = [f for f in blind if not f["built"]]
    if unfit:
        version = some(f["versions"]["torch"] for f in unfit)
        todo = "Install torch and torchvision for GPUs: https://pytorch.org/get-started/locally/"
        return "", f"torch {version} {on(unfit)} is for CPUs only, and there are GPUs. {todo}"
    if blind:
        todo = "Ask for them (--gpus-per-node); if you did, is the driver too old? See nvidia-smi"
        return "", f"torch sees none {on(blind)}, which has some. {todo} and day2/SITES.md"
    counts, shared, even = {}, "", True
    for group in grouped(everyone, lambda f: f["node"]).values():
        seen = {gpu for f in group for gpu in f["gpus"]}
        used = [f["gpus"][f["local_rank"] % len(f["gpus"])] for f in group if f["gpus"]]
        counts.setdefault(len(seen), []).extend(group)
        if len(set(used)) < min(len(used), len(seen)):
            text = f"ranks {some(f['rank'] for f in group)} {on(group)} use only {some(used)}"
            return "", f"{text}. Let each see all of its node: --gpus-per-node alone"
        if len(set(used)) == len(group) and any(f["backend"] == "gloo" for f in group):
            text = f"each of ranks {some(f['rank'] for f in group)} {on(group)} has its own, but"
            text += " they would talk through gloo, which is slow"
            if all(len(f["gpus"]) >= len(group) for f in group):
                return "", f"{text}: this torch has nothing else for them. See day2/SITES.md"
            todo = f"export SLURM_GPUS_ON_NODE={len(group)}"
            return "", f"{text}, because Slurm does not say how many GPUs there are. {todo}"
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


def check_lockable(everyone):
    """Check that InfiniBand cards may keep enough in memory (nccl-tests#206)."""
    used = [f for f in everyone if f["infiniband"] and f["gpus"]]
    low = [f for f in used if f["lockable"] != resource.RLIM_INFINITY and f["lockable"] < LOCKABLE]
    if low and len({f["host"] for f in everyone}) > 1:
        text = f"only {low[0]['lockable'] / 2**20:,.0f} MB {on(low)}, too little for InfiniBand"
        return "", f"{text}. Ask your site for: ulimit -l unlimited"
    return "enough for InfiniBand" if used else "no InfiniBand that needs it", ""


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
    "locked memory": check_lockable,
}
