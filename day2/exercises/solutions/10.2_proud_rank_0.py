"""Solution 10.2: an accuracy that only rank 0 believes.

Lesson:  10
Kind:    find the fault, 15 minutes
Symptom: Rank 0 reports 100 % right. The same model, evaluated by one process, gets 6 of
         11.
Run:     python day2/exercises/solutions/10.2_proud_rank_0.py
Check:   python scripts/check.py 10.2 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def evaluate(model, images, labels, rank, world_size):
    """Return the share of all images that is right, from 0 to 1. On every rank."""
    mine = slice(rank, None, world_size)  # the parts may differ in size
    right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    counts = torch.stack([right, torch.tensor(len(labels[mine]))])
    # Counts, not shares: a mean of shares is wrong for unequal parts.
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    """Run on every rank: evaluate a model that says 0 to all images."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    labels = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0])
    images = torch.tensor([[1.0, 0.0]]).repeat(11, 1)
    shares = gather(evaluate(torch.nn.Identity(), images, labels, rank, world_size))
    if rank == 0:
        print(f"=> {shares[0]:.1%} right, says rank 0")
        print("the others say", *(f"{share:.1%}" for share in shares[1:]))


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
