"""Exercise 13.1: gradient accumulation: several batches, one step, one message.

Lesson:  13
Kind:    fill in, 15 minutes
Task:    Complete step(): one step for all batches of a group, and one message for it.
         Every point counts the same, although the last batch is smaller. There's memory
         for one batch at a time. The run does not count messages: only the check does.
Run:     python day2/exercises/13.1_one_step.py
Check:   python scripts/check.py 13.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def step(model, optimizer, group):
    """Take one step against the gradient of the mean loss over all points of the group.

    model is wrapped by DistributedDataParallel; group is a list of batches (x, y).
    """
    # TODO 1: the loss of a group is a mean over its points, no sum over its batches.
    # TODO 2: let the ranks average gradients once per step, not in each backward.
    optimizer.zero_grad()
    for x, y in group:
        F.mse_loss(model(x), y).backward()
    optimizer.step()


def main():
    """Run on every rank: ten steps, each on batches of 4, 4, 4 and 1 points."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.linspace(-1, 1, 13)[:, None]
    for number in range(10):
        step(model, optimizer, list(zip(x.split(4), (2 * x).split(4))))
        if dist.get_rank() == 0:
            loss = F.mse_loss(model.module(x), 2 * x).item()
            print(f"after step {number}: loss {loss:.2g}")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
