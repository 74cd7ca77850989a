"""Exercise 4.1: training that gets worse with every rank.

Lesson:  4
Kind:    find the fault, 15 minutes
Symptom: All ranks hold the same parameters, and the learning rate is the same. Yet four
         ranks learn more slowly than one, although both use the same 64 points in each
         step.
Run:     python day1/exercises/4.1_more_ranks_worse.py
Check:   python scripts/check.py 4.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def train(x, y, rank, world_size):
    """Train a new model on this rank's part of x and y. Return it and its losses."""
    torch.manual_seed(0)
    model = nn.Linear(x.shape[1], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = x[rank::world_size], y[rank::world_size]
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # no step is too long
        if world_size > 1:
            average_gradients(model, world_size)
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def main():
    """Run on every rank: train together, then rank 0 alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = make_points()
    _, together = train(x, y, rank, world_size)
    dist.all_reduce(together)  # the loss over all points is the mean over the ranks
    if rank == 0:
        _, alone = train(x, y, 0, 1)
        for step in range(0, 40, 13):
            pair = (
                f"{alone[step]:.2f} alone, {together[step] / world_size:.2f} together"
            )
            print(f"step {step}: loss {pair}")


def make_points():
    """Return 64 points: x float32 [64, 8] and y [64, 1]. The ranks' parts differ."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    noise = torch.tensor([9.0, -9.0, 6.0, -6.0]).repeat(16)  # so a mean of 0
    return x, x.sum(dim=1, keepdim=True) + noise.unsqueeze(1)


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    for parameter in model.parameters():  # none is frozen
        dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
        parameter.grad /= world_size  # the mean, not the sum


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
