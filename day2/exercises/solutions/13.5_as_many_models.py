"""Solution 13.5: fine-tuning that ends with as many models as ranks.

Lesson:  13
Kind:    find the fault, 10 minutes
Symptom: For ten steps only the last layer is trained, then both. The loss falls and
         nothing complains. But the ranks end with different models.
Run:     python day2/exercises/solutions/13.5_as_many_models.py
Check:   python scripts/check.py 13.5 --solution
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
    """Train the last layer for ten steps, then both for ten. Return the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    points = torch.randn(64, 4)
    x = points[rank::world_size]
    y = x.square().sum(dim=1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model[0].requires_grad_(False)
    ddp_model = DistributedDataParallel(model)
    for step in range(20):
        if step == 10:
            model[0].requires_grad_(True)
            # DDP averages what required a gradient when it was made: make it again.
            ddp_model = DistributedDataParallel(model)
        optimizer.zero_grad()
        F.mse_loss(ddp_model(x), y).backward()
        optimizer.step()
    return model


def main():
    """Run on every rank: train, and look at the sums of both layers."""
    model = train(dist.get_rank(), dist.get_world_size())
    rows = gather([layer.weight.sum().item() for layer in (model[0], model[2])])
    if dist.get_rank() == 0:
        for rank, (first, last) in enumerate(rows):
            print(f"rank {rank}: first layer {first:.5f}, last layer {last:.5f}")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
