"""Solution 12.1: what is left of the epoch.

Lesson:  12
Kind:    fill in
Task:    Complete my_rest(): of the images that the epoch has left after a restart, this rank's
         share. The job may go on with another number of ranks. Images that do not go round
         are left out.
Run:     python day2/exercises/solutions/12.1_what_is_left.py
Check:   python scripts/check.py 12.1 --solution
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


def my_rest(order, seen, rank, world_size):
    """Return this rank's images of those that are left, int64. order: all images of the epoch.

    seen is how many of them all ranks together had used when the snapshot was written.
    """
    # First the rest, then the shares. The other way round the old number of ranks would count.
    rest = order[seen:]
    rest = rest[: len(rest) // world_size * world_size]  # unequal parts would make ranks wait
    return rest[rank::world_size]


def main():
    """Run on every rank: an epoch of 12 images, 6 of them used before the restart."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    for r, part in enumerate(gather(my_rest(order, 6, rank, world_size).tolist())):
        if rank == 0:
            print(f"used: {sorted(order[:6].tolist())}, rank {r} goes on with {part}")


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
