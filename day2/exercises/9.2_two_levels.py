"""Exercise 9.2: a sum over nodes that spares the network.

Lesson:  9
Kind:    fill in
Task:    Complete sum_over_nodes(): add up within each node, then between the nodes, one rank
         of each, then tell the others on the node. No rank uses the group of all ranks.
Run:     python day2/exercises/9.2_two_levels.py
Check:   python scripts/check.py 9.2
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_nodes(value, within, between, leader):
    """Replace value, on every rank, by the sum over all ranks.

    within: the group of the ranks of this node; between: a group with one rank of each node, for
    all others None; leader: the rank of this node that is in between.
    """
    # TODO: three collectives. The second one is only for the rank that is the leader.


def make_groups(per_node):
    """Return the groups within and between, and the leader, for this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    leaders = list(range(0, world_size, per_node))
    nodes = [list(range(first, first + per_node)) for first in leaders]
    within, _ = dist.new_subgroups_by_enumeration(nodes)
    between = dist.new_group(leaders)  # every rank must make all groups
    leader = rank // per_node * per_node
    return within, between if rank == leader else None, leader


def main():
    """Run on every rank: two imitated nodes of two ranks add up their numbers."""
    value = torch.tensor(float(dist.get_rank()))
    sum_over_nodes(value, *make_groups(2))
    for rank, result in enumerate(gather(value.item())):
        if dist.get_rank() == 0:
            print(f"rank {rank}: {result:g}")


def start(rank, world_size, port):
    """Be one rank: join the process group, run main, leave the group."""
    store = dist.TCPStore("127.0.0.1", port)
    wait = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
    main()
    dist.barrier()
    dist.destroy_process_group()


def launch(world_size):
    """Start the ranks on this machine, all of them on the CPU."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        mp.set_forkserver_preload(["torch", "torch._dynamo"])
    mp.start_processes(start, (world_size, server.port), world_size, start_method="forkserver")


if __name__ == "__main__":
    launch(4)
