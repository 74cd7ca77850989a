"""Solution 6.2: a checkpoint that is sometimes unreadable.

Lesson:  6
Kind:    find the fault
Symptom: Mostly it works. Now and then a rank cannot read the checkpoint, or it holds the
         weights of whichever rank was last.
Run:     python day1/exercises/solutions/6.2_sometimes_unreadable.py
Check:   python scripts/check.py 6.2 --solution
"""

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def save(model, path):
    """Write the weights to path. Every rank calls this; afterwards every rank may read them."""
    if dist.get_rank() == 0:  # all ranks hold the same weights: one of them writes
        torch.save(model.state_dict(), path)
    dist.barrier()  # nobody reads before the file is whole


def reads(path):
    """Return whether the checkpoint can be read."""
    try:
        torch.load(path, weights_only=True)
    except Exception:  # torch.load has many ways to say it
        return False
    return True


def main():
    """Run on every rank: save and read 30 times. Let rank 0 show how often that went wrong."""
    model, rounds, failed = nn.Linear(500, 500), 30, 0
    with tempfile.TemporaryDirectory() as folder:
        folder = gather(folder)[0]  # rank 0's folder, the same for all
        for number in range(rounds):
            path = Path(folder, f"{number}.pt")
            dist.barrier()
            save(model, path)
            failed += not reads(path)
        counts = gather(failed)
    for rank, count in enumerate(counts):
        if dist.get_rank() == 0:
            print(f"rank {rank}: could not read {count} of {rounds} checkpoints")


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
