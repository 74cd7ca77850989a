"""Exercise 9.2: a sum within nodes, then between them.

Lesson:  9
Kind:    fill in, 20 minutes
Task:    Complete sum_over_nodes(): add up within each node, then between the nodes, one
         rank of each, then tell the others on the node. No rank uses the group of all
         ranks.
Run:     python day2/exercises/9.2_two_levels.py
Check:   python scripts/check.py 9.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def sum_over_nodes(value, within, between, leader):
    """Replace value, on every rank, by the sum over all ranks.

    within: the group of the ranks of this node. leader: its leader's rank.
    between: the group of the leaders, one per node; None for all other ranks.
    """
    # TODO: three collectives. The second one is only for the rank that is the leader.


def main():
    """Run on every rank: two simulated nodes of two ranks add up their numbers."""
    value = torch.tensor(float(dist.get_rank()))
    within, between, leader = make_groups(2)
    sum_over_nodes(value, within, between, leader)
    for rank, result in enumerate(gather(value.item())):
        if dist.get_rank() == 0:
            print(f"rank {rank}: {result:g}")


def make_groups(per_node):
    """Return the groups within and between, and the leader, for this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    leaders = list(range(0, world_size, per_node))
    nodes = [list(range(first, first + per_node)) for first in leaders]
    timeout = timedelta(seconds=20)
    within, _ = dist.new_subgroups_by_enumeration(nodes, timeout)
    between = dist.new_group(leaders, timeout)  # every rank must make all groups
    leader = rank // per_node * per_node
    if rank != leader:
        between = None
    return within, between, leader


# ---- Shared helpers, identical in every exercise


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start():
    """Be one rank: join the process group, run main, leave the group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    main()
    dist.barrier()  # leave together
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        start()
    else:  # started with python: let torchrun start the ranks
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
