"""Exercise 9.1: a group in which the second node fails.

Lesson:  9
Kind:    find the fault, 10 minutes
Symptom: Two nodes with two ranks each (they are simulated). One rank per node reads the
         labels and tells them to the other. On the first node this works. The second
         node stops with an error, as soon as its first rank wants to tell.
Run:     python day2/exercises/9.1_only_the_first_node.py
Check:   python scripts/check.py 9.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def load_labels(within):
    """Return the labels, float32 [4], on every rank. One rank of each node reads them.

    within: the group of the ranks of this node.
    """
    labels = torch.empty(4)
    if dist.get_rank(within) == 0:  # the first rank of this node
        labels = read()
    dist.broadcast(labels, src=0, group=within)
    return labels


def main():
    """Run on every rank: make two nodes of two ranks, load the labels."""
    labels = load_labels(make_nodes(2))
    print(f"rank {dist.get_rank()}: labels {labels.tolist()}", flush=True)


def read():
    """Return the labels, as if they were in a file on this node."""
    return torch.tensor([5.0, 0.0, 4.0, 1.0])


def make_nodes(per_node):
    """Return the group of the ranks of this rank's simulated node."""
    ranks = list(range(dist.get_world_size()))
    nodes = [ranks[first : first + per_node] for first in ranks[::per_node]]
    timeout = timedelta(seconds=20)
    within, _ = dist.new_subgroups_by_enumeration(nodes, timeout)
    return within


# ---- Shared helpers, identical in every exercise


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
