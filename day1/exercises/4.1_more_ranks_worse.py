"""Exercise 4.1: the more ranks, the worse.

Lesson:  4
Kind:    find the fault
Symptom: One rank alone learns. With four, the loss grows and grows, although the ranks
         share out the same 64 numbers of each step and nothing else was changed.
Run:     python day1/exercises/4.1_more_ranks_worse.py
Check:   python scripts/check.py 4.1
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    gradients = [parameter.grad for parameter in model.parameters()]
    # All of them in one message: every message costs time, however short it is.
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    nn.utils.vector_to_parameters(flat, gradients)


def train(rank, world_size):
    """Fit a straight line to 64 points. Return the loss of every step on this rank's part."""
    torch.manual_seed(0)  # the same first weights, and the same points, on every rank
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(64, 1)
    y = 0.7 * x + 0.3
    x, y = x[rank::world_size], y[rank::world_size]
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if world_size > 1:
            average_gradients(model, world_size)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Run on every rank: train together, then rank 0 alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    together = train(rank, world_size)
    if rank == 0:
        alone = train(0, 1)
        for step in range(0, 20, 5):
            print(f"step {step}: loss {alone[step]:.2g} alone, {together[step]:.2g} together")


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
