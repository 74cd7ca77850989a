"""Lesson 9: the same sum across nodes, and what the network between them costs.

Builds on: 1_torch_dist_gpu.py
New here:  local rank, node, process groups of some of the ranks
Run:       scripts/multinode_setup_and_run.sh day2/9_torch_dist_multi_node.py
Look for:  => 2 nodes, 4 ranks: every rank holds ...; the sum 0+1+2+3 is ...: ok
Try next:  --torchrun before the file; one rank per node; 4 kB and 64 MB between nodes.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SIZES = {"4 kB": 1_000, "1 MB": 250_000, "64 MB": 16_000_000}  # numbers of 4 bytes each


def time_all_reduce(numbers, device, group):
    """Return the seconds that one all_reduce of float32 numbers took, 5 times."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor, group=group)  # sets up connections: not timed
    seconds = []
    for _ in range(5):
        torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(4):
            dist.all_reduce(tensor, group=group)
        # The calls return before a GPU has done the work. Wait, then read the clock.
        torch.get_device_module(device).synchronize()
        seconds.append((time.perf_counter() - begin) / 4)
    return seconds


def make_groups():
    """Return two groups: of the ranks of this node, and of one rank of every node.

    And the number of nodes. Every rank must make all groups, also those without it.
    """
    # The ranks of a node follow each other, so all of them find the same first one.
    firsts = gather(dist.get_rank() - int(os.environ["LOCAL_RANK"]))
    leaders = sorted(set(firsts))
    nodes = [[r for r in range(len(firsts)) if firsts[r] == first] for first in leaders]
    # A group has its own timeout. If none is given: gloo 30 minutes, NCCL 10.
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    within, _ = dist.new_subgroups_by_enumeration(nodes, timeout=timeout)
    between = dist.new_group(leaders, timeout=timeout)
    return within, between, len(nodes)


def main(device):
    """Run on every rank: the same code, told apart only by the rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    value = torch.tensor(float(rank), device=device)
    before = value.item()
    # Every rank gives its value, and every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Lines printed by several processes come in any order: rank 0 collects and prints.
    place = f"{socket.gethostname()}, local rank {os.environ['LOCAL_RANK']}, {device}"
    rows = gather((before, value.item(), place))
    if rank == 0:
        for r, (before, after, name) in enumerate(rows):
            who = f"rank {r} of {world_size} on {name}"
            print(f"{who}: {before:g} before, {after:g} after")

    within, between, nodes = make_groups()
    for where, group in (("within a node", within), ("between nodes", between)):
        ranks = dist.get_world_size(group)  # -1 on a rank that is not in the group
        for size, numbers in SIZES.items():
            mine = time_all_reduce(numbers, device, group) if ranks > 0 else [0] * 5
            rounds = slowest_rank(mine)
            seconds = statistics.median(rounds)
            # Algorithm bandwidth: size / time. Bus bandwidth: what a link carries. In a
            # ring of n ranks nearly every number passes every link twice, exactly
            # 2 (n - 1) / n times. Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
            algorithm = numbers * 4 / seconds / 1e6
            bus = algorithm * 2 * (ranks - 1) / ranks
            if rank == 0 and ranks > 1:
                speeds = f"{algorithm:7,.1f} MB/s (bus {bus:7,.1f})"
                row = f"{milliseconds(rounds)}, {speeds}"
                print(f"{where}, {ranks} ranks, {size:>5}: {row}")
    if rank == 0:
        sums = [after for _, after, _ in rows]
        claim, correct = check_sums(sums)
        return prove(f"{nodes} nodes, {world_size} ranks: {claim}", correct)


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def check_sums(sums):
    """Return what the ranks hold, and what they should, as a text; and if it is right.

    sums: the values of all ranks, in rank order.
    """
    expected = sum(range(len(sums)))
    terms = "+".join(str(rank) for rank in range(len(sums)))
    held = ", ".join(f"{value:g}" for value in sorted(set(sums)))
    correct = all(value == expected for value in sums)
    return f"every rank holds {held}; the sum {terms} is {expected}", correct


def slowest_rank(seconds):
    """Return for each round the time of its slowest rank. Every rank must call this."""
    return [max(times) for times in zip(*gather(seconds), strict=True)]


def milliseconds(rounds):
    """Return the median of times in seconds, with the lowest and the highest."""
    median = statistics.median(rounds) * 1e3
    return f"{median:7.3f} ms ({min(rounds) * 1e3:.2f}-{max(rounds) * 1e3:.2f})"


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind in ("cpu", "mps"):  # there are no collectives for Apple's GPU
        return torch.device("cpu"), "gloo"
    device = torch.device(kind, local_rank % count)
    # Where Slurm shows a rank only its own GPU, the launcher says how many there are.
    # Parts of a GPU (MIG) do not count: NCCL takes two of them for the same GPU.
    if count == 1 and "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        count = int(os.environ.get("GPUS_ON_NODE", 1))
    shared = local_world_size > count
    if kind == "xpu" and (shared or not dist.is_xccl_available()):
        return torch.device("cpu"), "gloo"  # gloo cannot carry tensors of Intel's GPUs
    torch.accelerator.set_device_index(device.index)
    # We compare runs: a run must give the same numbers again, with little rounding
    # (TF32 keeps 11 of float32's 24 bits). A real job may leave out these lines.
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    torch.backends.cuda.matmul.allow_tf32 = False  # True in NVIDIA's containers
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and newer
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def start(*arguments):
    """Run as one rank: join the process group, call main, leave the group."""
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, backend = choose_device(local_rank, local_world_size)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    # NCCL's other way to connect hangs at random before torch 2.7.1 (pytorch#153960).
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    device_id = None if backend == "gloo" else device  # with it, NCCL connects at once
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        setting = f"device: {device.type}, backend: {backend}"
        print(f"ranks: {dist.get_world_size()}, {setting}")
    status = main(device, *arguments)
    # The others wait here while rank 0 still works, at most as long as the timeout.
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    # gloo's threads may still be freeing tensors, and need Python for that. Without a
    # pause, torch before 2.8 can hang in the next line (pytorch#154976), and Python can
    # abort while it ends.
    time.sleep(0.2)
    dist.destroy_process_group()
    sys.exit(status)  # of rank 0: whether the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    parse_args()
    start()
