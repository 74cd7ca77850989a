"""Solution 20.1: a learning rate that falls too fast.

Lesson:  20
Kind:    find the fault, 15 minutes
Symptom: The learning rate is to fall in a straight line until the epoch ends. With one
         rank it does. With two it has fallen to the end after half of the epoch.
Run:     python day2/exercises/solutions/20.1_falls_too_fast.py
Check:   python scripts/check.py 20.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset


def train(accelerator, points):
    """Train a new model for one epoch. Return the learning rate of every step."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(points, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # From the full rate down to a tenth of it, in as many steps as this rank takes.
    # A prepared scheduler takes world_size steps at a time: that suits a plan for one
    # process. This plan counts the steps of a rank, so the scheduler stays as it is.
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader))
    rates = []
    for x, y in loader:
        rates.append(scheduler.get_last_lr()[0])
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
    return rates


def main():
    """Run on every rank: train on 64 points, and show the learning rates."""
    accelerator = Accelerator(cpu=True)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    rates = train(accelerator, TensorDataset(x, 2 * x))
    accelerator.print("learning rates:", " ".join(f"{rate:.3f}" for rate in rates))


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
