"""Exercise 4.4: DistributedSampler by hand.

Lesson:  4
Kind:    fill in, 20 minutes
Task:    Complete my_part(): shuffled, in a new order in each epoch, every image to
         only one rank, and the same number to each rank. Leave out images that cannot
         be divided evenly.
Run:     python day1/exercises/4.4_my_part.py
Check:   python scripts/check.py 4.4
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def my_part(count, epoch, rank, world_size):
    """Return the numbers of this rank's images, int64. There are count images."""
    # TODO 1: shuffle the numbers from 0 to count - 1 with
    #         torch.randperm(count, generator=torch.Generator().manual_seed(...)).
    # TODO 2: keep as many as can be divided evenly. Return this rank's share.
    return torch.arange(count)


def main():
    """Run on every rank: divide 11 images, twice."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in range(2):
        for r, part in enumerate(gather(my_part(11, epoch, rank, world_size).tolist())):
            if rank == 0:
                print(f"epoch {epoch}, rank {r}: images {part}")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=3"]
        options.append(__file__)
        torchrun(options)
