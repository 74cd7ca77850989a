"""Exercise 4.3: the ranks never agree.

Lesson:  4
Kind:    find the fault
Symptom: The gradients are averaged, the learning rate is right, every rank takes the same
         steps. And yet the ranks end with models that differ.
Run:     python day1/exercises/4.3_never_agree.py
Check:   python scripts/check.py 4.3
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    gradients = [parameter.grad for parameter in model.parameters()]
    # All of them in one message: every message costs time, however short it is.
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    nn.utils.vector_to_parameters(flat / world_size, gradients)  # the mean, not the sum


def train(x, y, rank, world_size):
    """Train a new model on this rank's part of x and y, float32 [N, 1]. Return it."""
    torch.manual_seed(rank)  # every rank has noise of its own
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
