"""Solution 19.2: a process that grows with the file it reads.

Lesson:  19
Kind:    find the fault, 15 minutes
Symptom: A file is read in parts of 4 MB, and each part is copied and forgotten. Yet the
         memory of the process grows by as much as the file is large.
Run:     python day2/exercises/solutions/19.2_memory_that_grows.py
Check:   python scripts/check.py 19.2 --solution
"""

import os
import resource
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

COUNT, PART = 12_000_000, 1_000_000  # numbers of 4 bytes: in the file, read at once


class Ratings:
    """The ratings in a file: float32 [COUNT]."""

    def __init__(self, path):
        self.path = path

    def part(self, begin, end):
        """Return a copy of some of them."""
        # What was touched counts until the map is gone: this one is gone immediately.
        return torch.from_numpy(np.memmap(self.path, np.float32, "r")[begin:end].copy())


def main():
    """Run on every rank: read a file, and see what that does to the memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ratings")
        write(path)
        before = peak_memory()
        average = mean(Ratings(path))
        grown = peak_memory() - before
    rows = gather(f"mean {average}, memory grew by {grown:.0f} MB")
    for rank, row in enumerate(rows):
        if dist.get_rank() == 0:
            print(f"rank {rank}: read {COUNT * 4 / 1e6:.0f} MB, {row}")


def write(path):
    """Write the file, 5 and 0 by turns, in parts."""
    with path.open("xb") as file:
        for _ in range(0, COUNT, PART):
            file.write(np.tile(np.float32([5, 0]), PART // 2).tobytes())


def peak_memory():
    """Return the most memory that this process has held, in MB."""
    # ru_maxrss counts bytes on a Mac and kilobytes elsewhere.
    megabyte = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / megabyte


def mean(ratings):
    """Return the mean of all ratings."""
    return (
        sum(ratings.part(n, n + PART).sum().item() for n in range(0, COUNT, PART))
        / COUNT
    )


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
