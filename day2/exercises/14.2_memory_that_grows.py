"""Exercise 14.2: memory that grows with the file.

Lesson:  14
Kind:    find the fault
Symptom: A file is read in parts of 4 MB, and each part is copied and forgotten. Yet the memory of
         the process grows by as much as the file is large.
Run:     python day2/exercises/14.2_memory_that_grows.py
Check:   python scripts/check.py 14.2
"""

import os
import resource
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNT, PART = 12_000_000, 1_000_000  # numbers of 4 bytes: in the file, read at once


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Ratings:
    """The ratings in a file: float32 [COUNT]."""

    def __init__(self, path):
        self.path = path
        self.numbers = np.memmap(path, np.float32, "r")

    def part(self, begin, end):
        """Return a copy of some of them."""
        return torch.from_numpy(self.numbers[begin:end].copy())


def write(path):
    """Write the file, 5 and 0 by turns, in parts."""
    with path.open("xb") as file:
        for _ in range(0, COUNT, PART):
            file.write(np.tile(np.float32([5, 0]), PART // 2).tobytes())


def peak_memory():
    """Return the most memory that this process has held, in MB."""
    megabyte = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / megabyte


def mean(ratings):
    """Return the mean of all ratings."""
    return sum(ratings.part(n, n + PART).sum().item() for n in range(0, COUNT, PART)) / COUNT


def main():
    """Run on every rank: read a file, and see what that does to the memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ratings")
        write(path)
        before = peak_memory()
        rows = gather(f"mean {mean(Ratings(path))}, memory grew by {peak_memory() - before:.0f} MB")
    for rank, row in enumerate(rows):
        if dist.get_rank() == 0:
            print(f"rank {rank}: read {COUNT * 4 / 1e6:.0f} MB, {row}")


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
    launch(2)
