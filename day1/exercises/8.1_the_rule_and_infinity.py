"""Exercise 8.1: the linear rule, and a loss that explodes.

Lesson:  8
Kind:    find the fault, 15 minutes
Symptom: The learning rate is scaled as in lesson 8. One process learns, but with four
         the loss grows until it is no number any more.
Run:     python day1/exercises/8.1_the_rule_and_infinity.py
Check:   python scripts/check.py 8.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LR = 0.2  # for one process
BATCH_SIZE = 8  # with this many points in a batch


def train(points, rank, world_size):
    """Train a new model for one epoch. Return it, the steps and the learning rate."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = nn.Linear(4, 1)
    if world_size > 1:
        model = DistributedDataParallel(model)  # averages gradients in backward
    lr = LR * world_size  # the linear scaling rule
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sampler = DistributedSampler(points, world_size, rank, seed=0)
    loader = DataLoader(points, batch_size=BATCH_SIZE // world_size, sampler=sampler)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return model, len(loader), lr


def main():
    """Run on every rank: train together, then rank 0 alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    points = make_points()
    x, y = points.tensors
    model, steps, lr = train(points, rank, world_size)
    if rank == 0:
        loss = F.mse_loss(model(x), y).item()
        print(f"{world_size} processes: {steps} steps at {lr:g}, then loss {loss:.2g}")
        model, steps, lr = train(points, 0, 1)
        loss = F.mse_loss(model(x), y).item()
        print(f"one process: {steps} steps at {lr:g}, then loss {loss:.2g}")


def make_points():
    """Return 1,024 points: x float32 [1024, 4] and their sum, y [1024, 1]."""
    x = torch.randn(1024, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


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
