"""Exercise 15.1: what prepare does to a loader.

Lesson:  15
Kind:    fill in
Task:    Complete my_batches(): in each step every rank takes the next batch, rank 0 the first
         of them. All ranks take as many steps; batches that do not go round are left out.
Run:     python day2/exercises/15.1_what_prepare_does.py
Check:   python scripts/check.py 15.1
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


def my_batches(batches, rank, world_size):
    """Return this rank's batches, a list, of those of the loader, a list."""
    # TODO: in step 0 the ranks take batches 0, 1, 2, ...; in step 1 they go on from there.
    return batches


def main():
    """Run on every rank: share out 8 batches of 2 points."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = list(torch.arange(16).split(2))
    mine = [batch.tolist() for batch in my_batches(batches, rank, world_size)]
    for r, part in enumerate(gather(mine)):
        if rank == 0:
            print(f"rank {r}: {len(part)} steps, {part}")


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
