"""Exercise 4.3: models that differ from rank to rank.

Lesson:  4
Kind:    find the fault, 15 minutes
Symptom: The gradients are averaged, the learning rate is right, every rank takes the
         same steps. And yet the ranks end with models that differ.
         The check wants equal models in every step, and each rank's own noise.
Run:     python day1/exercises/4.3_never_agree.py
Check:   python scripts/check.py 4.3
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def train(x, y, rank, world_size):
    """Train a new model on this rank's part of x and y, float32 [N, 1]. Return it."""
    torch.manual_seed(rank)  # every rank has its own noise
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = x[rank::world_size], y[rank::world_size]
    for _ in range(50):
        optimizer.zero_grad()
        noise = 0.01 * torch.randn_like(x)  # makes the model less sensitive
        F.mse_loss(model(x + noise), y).backward()
        average_gradients(model, world_size)
        optimizer.step()
    return model


def main():
    """Run on every rank: train, and let rank 0 compare the models."""
    x = torch.linspace(-2, 2, 64)[:, None]
    model = train(x, torch.sin(x), dist.get_rank(), dist.get_world_size())
    for rank, output in enumerate(gather(model(torch.ones(1, 1)).item())):
        if dist.get_rank() == 0:
            print(f"rank {rank}: its model says sin(1) = {output:.6f}")


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    for parameter in model.parameters():  # none is frozen
        dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
        parameter.grad /= world_size  # the mean, not the sum


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
