"""Exercise 6.2: a checkpoint that cannot always be read.

Lesson:  6
Kind:    find the fault, 10 minutes
Symptom: Mostly it works. Now and then a rank cannot read the checkpoint, or it holds
         the weights of whichever rank was last.
Run:     python day1/exercises/6.2_sometimes_unreadable.py
Check:   python scripts/check.py 6.2
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def save(model, path):
    """Write the weights to path. All ranks call this, and then all may read it."""
    torch.save(model.state_dict(), path)


def main():
    """Run on every rank: save and read 30 times. Count how often that fails."""
    model = nn.Linear(500, 500)
    rounds = 30
    failed = 0
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


def reads(path):
    """Return whether the checkpoint can be read."""
    try:
        torch.load(path, weights_only=True)
    except Exception:  # torch.load has many ways to say it
        return False
    return True


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
