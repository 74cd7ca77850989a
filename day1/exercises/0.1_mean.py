"""Exercise 0.1: the mean over all ranks.

Lesson:  0
Kind:    fill in, 10 minutes
Task:    Complete mean(): every rank must get the mean of the values of all ranks. The
         tensor that it was given must stay as it was.
Run:     python day1/exercises/0.1_mean.py
Check:   python scripts/check.py 0.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def mean(value):
    """Return the mean of the ranks' values, on every rank. value: float32."""
    # TODO: add up the values of all ranks, divide the sum. Leave value itself alone.
    return value


def main():
    """Run on every rank: the mean of 0, 1, 2, ..."""
    value = torch.tensor(float(dist.get_rank()))
    rows = gather((value.item(), mean(value).item()))
    if dist.get_rank() == 0:
        for rank, (before, after) in enumerate(rows):
            print(f"rank {rank}: value {before:g}, mean over the ranks {after:g}")


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
