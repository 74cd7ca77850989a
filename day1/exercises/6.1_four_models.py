"""Exercise 6.1: four ranks, four models, and no error.

Lesson:  6
Kind:    find the fault, 5 minutes
Symptom: The program is fast, and the loss of each rank falls. But in the end each rank
         has a different model.
Run:     python day1/exercises/6.1_four_models.py
Check:   python scripts/check.py 6.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size):
    """Train a new model on 64 points. Return it and the loss of every step."""
    torch.manual_seed(0)  # the same first weights, and the same points, on every rank
    model = nn.Sequential(nn.Linear(16, 100), nn.Tanh(), nn.Linear(100, 1))
    ddp_model = model
    if world_size > 1:
        ddp_model = DistributedDataParallel(model)  # averages gradients in backward
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    x = torch.randn(64, 16)
    y = x.sum(dim=1, keepdim=True).sin()
    x, y = x[rank::world_size], y[rank::world_size]
    losses = []
    ddp_model.train()
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def main():
    """Run on every rank: train, and let rank 0 compare the models."""
    rank = dist.get_rank()
    model, losses = train(rank, dist.get_world_size())
    answer = model(torch.ones(1, 16)).item()
    rows = gather((losses[0].item(), losses[-1].item(), answer))
    if rank == 0:
        for r, (first, last, answer) in enumerate(rows):
            result = f"loss {first:.3f}, then {last:.3f}"
            print(f"rank {r}: {result}; its model says {answer:.5f}")


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
