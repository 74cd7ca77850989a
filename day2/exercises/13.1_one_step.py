"""Exercise 13.1: four batches, one step.

Lesson:  13
Kind:    fill in
Task:    Complete step(): one step for all batches of a group, and one message for it. The points
         count alike, although the last batch is smaller.
Run:     python day2/exercises/13.1_one_step.py
Check:   python scripts/check.py 13.1
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


def step(model, optimizer, group):
    """Take one step against the gradient of the mean loss over all points of the group.

    model is wrapped by DistributedDataParallel; group is a list of batches (x, y) of this rank.
    """
    # TODO 1: the loss of the group is a mean over its points, not a sum over its batches.
    # TODO 2: let the ranks average their gradients once a step, not in each backward.
    optimizer.zero_grad()
    for x, y in group:
        F.mse_loss(model(x), y).backward()
    optimizer.step()


def main():
    """Run on every rank: ten steps, each on batches of 4, 4, 4 and 1 points of y = 2 x."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.3), torch.linspace(-1, 1, 13)[:, None]
    for number in range(10):
        step(model, optimizer, list(zip(x.split(4), (2 * x).split(4))))
        if dist.get_rank() == 0:
            loss = F.mse_loss(model.module(x), 2 * x).item()
            print(f"after step {number}: loss {loss:.2g}")


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
    launch(2)
