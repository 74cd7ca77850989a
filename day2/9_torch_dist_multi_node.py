"""Lesson 9: the same sum across nodes, and what the network between them costs.

Builds on: 1_torch_dist_gpu.py
New here:  five variables, node, local rank, process groups of some of the ranks
Run:       scripts/multinode_setup_and_run.sh day2/9_torch_dist_multi_node.py
           By hand, on two nodes with four GPUs, 128 cores: srun --ntasks-per-node 1
               --cpus-per-task 128 torchrun --nnodes 2 --nproc-per-node 4
               --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 FILE
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


def time_all_reduce(numbers, device, rounds, group):
    """Return the seconds that one all_reduce of float32 numbers took, in each round."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor, group=group)  # sets up connections: not timed
    seconds = []
    for _ in range(rounds):
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

    And the number of nodes. Every rank must make all groups, even those it isn't in.
    """
    # The ranks of a node follow each other, so all of them find the same first one.
    firsts = gather(dist.get_rank() - int(os.environ.get("LOCAL_RANK", 0)))
    leaders = sorted(set(firsts))
    nodes = [[r for r in range(len(firsts)) if firsts[r] == first] for first in leaders]
    # A group has its own timeout. If none is given: gloo 30 minutes, NCCL 10.
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    within, _ = dist.new_subgroups_by_enumeration(nodes, timeout=timeout)
    between = dist.new_group(leaders, timeout=timeout)
    return within, between, len(nodes)


def main(device, args):
    """Run on every rank: the same code, told apart only by the rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    value = torch.tensor(float(rank), device=device)
    # Every rank gives its value, and every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    local_rank = os.environ.get("LOCAL_RANK", 0)
    place = f"{socket.gethostname()}, local rank {local_rank}, {device}"
    # Lines of several processes arrive in any order, so rank 0 collects and prints.
    rows = gather((place, value.item()))
    if rank == 0:
        for r, (place, after) in enumerate(rows):
            print(f"rank {r} of {world_size} on {place}: {r} before, {after:g} after")

    within, between, nodes = make_groups()
    for where, group in (("within a node", within), ("between nodes", between)):
        ranks = dist.get_world_size(group)  # -1 on a rank that is not in the group
        for size, numbers in SIZES.items():
            if ranks > 1:
                seconds = time_all_reduce(numbers, device, args.rounds, group)
            if rank == 0 and ranks > 1:
                speed = describe(seconds, numbers, ranks)
                print(f"{where}, {ranks} ranks, {size:>5}: {speed}")
    if rank == 0:
        claim, correct = check_sums([after for _, after in rows])
        return prove(f"{nodes} nodes, {world_size} ranks: {claim}", correct)


def start(args):
    """Run as one rank: join the process group, call main, leave the group."""
    # Variables tell a process who it is. LOCAL_RANK: its number on this node. The other
    # four, RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, are for init_process_group.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


# ---- Shared helpers, identical in every lesson


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def check_sums(sums):
    """Return in words what the ranks hold and should hold, and whether it is right."""
    expected = sum(range(len(sums)))
    terms = "+".join(str(rank) for rank in range(len(sums)))
    held = ", ".join(f"{value:g}" for value in sorted(set(sums)))
    correct = all(value == expected for value in sums)
    return f"every rank holds {held}; the sum {terms} is {expected}", correct


def describe(seconds, numbers, ranks):
    """Return the median time of an all_reduce and its bandwidths, as a text."""
    median = statistics.median(seconds)
    # Algorithm bandwidth: size / time. Bus bandwidth: what a rank's link carries. In a
    # ring of n ranks nearly every number passes every link twice, exactly 2 (n - 1) / n
    # times. Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    algorithm = numbers * 4 / median / 1e6
    bus = algorithm * 2 * (ranks - 1) / ranks
    spread = f"{min(seconds) * 1e3:.2f}-{max(seconds) * 1e3:.2f}"
    bandwidths = f"{algorithm:7,.1f} MB/s (bus {bus:7,.1f})"
    return f"{median * 1e3:7.3f} ms ({spread}), {bandwidths}"


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def choose_device(local_rank, local_world_size):
    """Return this rank's device, and the backend that connects such devices."""
    torch.set_num_threads(1)  # more would spin while they wait: slow on busy cores
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    # Where each rank sees its own GPU only, the launcher says how many the node has.
    shared = local_world_size > int(os.environ.get("GPUS_ON_NODE", gpus))
    if kind in ("cpu", "mps") or (kind == "xpu" and shared):
        return torch.device("cpu"), "gloo"  # gloo cannot use Apple's mps, Intel's xpu
    device = torch.device(kind, local_rank % gpus)
    torch.accelerator.set_device_index(device.index)
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    parser.add_argument("--rounds", type=int, default=5, help="for each size (5)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    if not 0 < args.rounds < 2**31:
        parser.error("rounds must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
