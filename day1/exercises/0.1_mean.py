"""Exercise 0.1: the mean over all ranks.

Lesson:  0
Kind:    fill in
Task:    Complete mean(): every rank must get the mean of the values of all ranks.
         The tensor that it was given must stay as it was.
Run:     python day1/exercises/0.1_mean.py
Check:   python scripts/check.py 0.1
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


def mean(value):
    """Return the mean of the ranks' values, on every rank. value: float32, any shape."""
    # TODO: add up the values of all ranks, divide the sum. Leave value itself alone.
    return value


def main():
    """Run on every rank: the mean of 0, 1, 2, ..."""
    value = torch.tensor(float(dist.get_rank()))
    rows = gather((value.item(), mean(value).item()))
    if dist.get_rank() == 0:
        for rank, (before, after) in enumerate(rows):
            print(f"rank {rank}: value {before:g}, mean over the ranks {after:g}")


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
