"""Solution 8.2: the learning rate rises step by step.

Lesson:  8
Kind:    fill in, 10 minutes
Task:    Complete factor(): 1 in step 0, then rising in a straight line, world_size in
         step warm_up and from then on. Lesson 8 leaves this to LinearLR; LambdaLR
         multiplies by what your function returns.
Run:     python day1/exercises/solutions/8.2_warm_up.py
Check:   python scripts/check.py 8.2 --solution
"""

import os
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

LR = 0.01  # for one process


def factor(step, warm_up, world_size):
    """Return the factor for the learning rate of one process in this step."""
    # New weights cannot take a large rate yet.
    return 1 + (world_size - 1) * min(1, step / warm_up)


def learning_rates(steps, warm_up, world_size):
    """Return the learning rates of so many steps of training."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
    multiplier = partial(factor, warm_up=warm_up, world_size=world_size)
    scheduler = LambdaLR(optimizer, multiplier)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def main():
    """Run on every rank: show the learning rates of 8 steps, 5 of them warm-up."""
    rates = learning_rates(8, 5, dist.get_world_size())
    if dist.get_rank() == 0:
        print("learning rates:", *(f"{rate:.3f}" for rate in rates))


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
