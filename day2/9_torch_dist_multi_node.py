"""Lesson 9: the same sum across nodes, and what the network between them costs.

Builds on: 1_torch_dist_gpu.py
New here:  local rank, node, process groups of some of the ranks
Run:       scripts/multinode_setup_and_run.sh day2/9_torch_dist_multi_node.py
Look for:  => 2 nodes, 4 ranks: every rank holds the sum 0+1+2+3 = 6
Try next:  --torchrun before the file; one rank a node; compare 4 kB and 64 MB between nodes.
"""

import argparse
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SIZES = {"4 kB": 1_000, "1 MB": 250_000, "64 MB": 16_000_000}  # numbers of 4 bytes each


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not accelerator or accelerator.type == "mps":  # Apple's has no collectives
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    # Slurm may show each task one GPU only: then the node has more than this rank can see.
    count = max(count, int(os.environ.get("SLURM_GPUS_ON_NODE", 0)))
    shared = local_world_size > count  # then through gloo: NCCL refuses two ranks on one GPU
    return device, "gloo" if shared else dist.get_default_backend_for_device(device)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def time_all_reduce(numbers, device, group, repeats=10):
    """Return the seconds that one all_reduce of this many float32 numbers takes in a group."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor, group=group)  # the first call sets up connections: not timed
    torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor, group=group)
    # A GPU only notes what to do and works on: without this the clock is read too early.
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) / repeats


def main(device):
    """Run on every rank: the same code, told apart only by the rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    value = torch.tensor(float(rank), device=device)
    before = value.item()
    # Every rank gives its value, every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Lines printed by several processes come in any order, so rank 0 collects and prints them.
    rows = gather(
        (before, value.item(), f"{socket.gethostname()}, local rank {local_rank}, {device}")
    )
    # The ranks of a node follow each other, so all of them find the same first one.
    firsts = gather(rank - local_rank)
    leaders = sorted(set(firsts))
    if rank == 0:
        for r, (before, after, name) in enumerate(rows):
            print(f"rank {r} of {world_size} on {name}: {before:g} before, {after:g} after")
        terms, expected = "+".join(map(str, range(world_size))), sum(range(world_size))
        correct = all(after == expected for _, after, _ in rows)

    # A group for each node, and one with a rank of every node. Every rank must make all groups.
    nodes = [[r for r in range(world_size) if firsts[r] == first] for first in leaders]
    # A group does not take over the timeout of the first one: not given, it is half an hour.
    wait = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    within, _ = dist.new_subgroups_by_enumeration(nodes, timeout=wait)
    between = dist.new_group(leaders, timeout=wait)

    # Algorithm bandwidth: size / time. Bus bandwidth: what each rank's link carries, 2 (n - 1) / n
    # times as much, because in a ring nearly every number passes every link twice. Source:
    # NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    for where, group in (("within a node", within), ("between nodes", between)):
        ranks = dist.get_world_size(group)  # -1 on a rank that is not in the group
        for size, numbers in SIZES.items():
            seconds = max(gather(time_all_reduce(numbers, device, group) if ranks > 0 else 0))
            algorithm = numbers * 4 / seconds / 1e6
            bus = algorithm * 2 * (ranks - 1) / ranks
            if rank == 0 and ranks > 1:
                row = f"{seconds * 1e3:8.3f} ms, {algorithm:9,.1f} MB/s, bus {bus:9,.1f} MB/s"
                print(f"{where}, {ranks} ranks, {size:>5}: {row}")
    if rank == 0:
        verdict = "every rank holds" if correct else "WRONG: not every rank holds"
        size = f"{len(nodes)} nodes, {world_size} ranks"
        print(f"=> {size}: {verdict} the sum {terms} = {expected}")


def start(*arguments):
    """Be one rank, as the variables say: join the process group, run main, leave the group."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), os.environ.get("LOCAL_WORLD_SIZE")
    device, backend = choose_device(local_rank, int(local_world_size or 1))
    gloo, wait = backend == "gloo", timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group(backend, timeout=wait, device_id=None if gloo else device)
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    main(device, *arguments)
    dist.barrier()  # leave together; a rank that fails never gets here and ends the job
    dist.destroy_process_group()


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
