"""Solution 4.4: a sampler of your own.

Lesson:  4
Kind:    fill in
Task:    Complete my_part(): shuffled, in a new order in each epoch, every image to one rank
         only, and as many to each rank. Images that do not go round are left out.
Run:     python day1/exercises/solutions/4.4_my_part.py
Check:   python scripts/check.py 4.4 --solution
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


def my_part(count, epoch, rank, world_size):
    """Return the numbers of this rank's images in this epoch, int64. There are count images."""
    # The seed holds no rank: parts of different orders would have images in common.
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(count, generator=generator)
    order = order[: count // world_size * world_size]  # unequal parts would make ranks wait
    return order[rank::world_size]


def main():
    """Run on every rank: share out 11 images, twice."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in range(2):
        for r, part in enumerate(gather(my_part(11, epoch, rank, world_size).tolist())):
            if rank == 0:
                print(f"epoch {epoch}, rank {r}: images {part}")


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
    launch(3)
