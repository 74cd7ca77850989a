"""Solution 8.1: four ranks learn less from the same data.

Lesson:  8
Kind:    find the fault
Symptom: After one epoch the loss is much higher with four ranks than with one, although both
         have seen the same points. Use the linear rule of lesson 8.
Run:     python day1/exercises/solutions/8.1_four_times_too_slow.py
Check:   python scripts/check.py 8.1 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LR, BATCH_SIZE = 0.01, 8  # for one process


def make_optimizer(model, world_size):
    """Return the optimiser for training on world_size ranks, BATCH_SIZE points each."""
    # World_size times fewer steps, each over world_size times more points: so longer ones.
    return torch.optim.SGD(model.parameters(), lr=LR * world_size)


def train(rank, world_size):
    """Train a new model for one epoch. Return its loss over all points and the steps."""
    torch.manual_seed(0)  # the same first weights, and the same points, on every rank
    model = nn.Linear(4, 1)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(model, world_size)
    points = torch.randn(1024, 4)
    targets = points.sum(1, keepdim=True)
    x, y = points[rank::world_size], targets[rank::world_size]
    steps = list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE)))
    for inputs, wanted in steps:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    with torch.no_grad():
        return F.mse_loss(model(points), targets).item(), len(steps)


def main():
    """Run on every rank: train together, then rank 0 alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss, steps = train(rank, world_size)
    if rank == 0:
        print("one process: loss {:.6f} after {} steps".format(*train(0, 1)))
        print(f"{world_size} processes: loss {loss:.6f} after {steps} steps")


def start(rank, world_size, port):
    """Be one rank: join the process group, run main, leave the group."""
    store = dist.TCPStore("127.0.0.1", port)
    wait = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
    main()
    dist.barrier()
    dist.destroy_process_group()


def launch(world_size):
    """Start the ranks on this machine, all of them on the CPU."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        mp.set_forkserver_preload(["torch", "torch._dynamo"])
    mp.start_processes(start, (world_size, server.port), world_size, start_method="forkserver")


if __name__ == "__main__":
    launch(4)
