"""Exercise 2.1: steps of the optimizer, and a fair mean loss.

Lesson:  2
Kind:    fill in, 15 minutes
Task:    Complete train_one_epoch(): one step of the optimizer for every batch, and at
         the end the mean loss over all numbers. The last batch is smaller than the
         others. The run prints losses, but only the check knows the right ones.
Run:     python day1/exercises/2.1_one_epoch.py
Check:   python scripts/check.py 2.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def train_one_epoch(model, optimizer, batches):
    """Train on each batch once. Return the mean loss over all points."""
    total = 0.0
    count = 0
    for x, y in batches:
        loss = F.mse_loss(model(x), y)  # the mean over this batch
        # TODO 1: the gradients of this batch alone, and one step of the optimizer.
        # TODO 2: add to total and to count so that every point counts the same.
        total += loss.item()
        count += 1
    return total / count


def main():
    """Run on one rank: fit a straight line to 100 points in batches of 16."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(100, 1)
    y = 0.7 * x + 0.3
    for epoch in range(5):
        loss = train_one_epoch(model, optimizer, list(zip(x.split(16), y.split(16))))
        print(f"epoch {epoch}: loss {loss:.5f}")


# ---- Shared helpers, identical in every exercise


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options.append(__file__)
        torchrun(options)
