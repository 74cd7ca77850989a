"""Exercise 6.1: right, but slow.

Lesson:  6
Kind:    find the fault
Symptom: Lesson 4's program was given DistributedDataParallel. The losses are right. But a
         step takes longer than it should: more numbers travel than there are gradients.
Run:     python day1/exercises/6.1_right_but_slow.py
Check:   python scripts/check.py 6.1
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    nn.utils.vector_to_parameters(flat / world_size, gradients)


def train(rank, world_size, steps=20):
    """Train a new model on 64 points. Return it and the loss of every step."""
    torch.manual_seed(0)  # the same first weights, and the same points, on every rank
    model = nn.Sequential(nn.Linear(16, 1000), nn.Tanh(), nn.Linear(1000, 1))
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 16)
    y = x.sum(1, keepdim=True).sin()
    x, y = x[rank::world_size], y[rank::world_size]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if world_size > 1:
            average_gradients(model, world_size)
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def main():
    """Run on every rank: train together, then rank 0 alone. Show losses and time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    begin = time.perf_counter()
    _, together = train(rank, world_size)
    seconds = (time.perf_counter() - begin) / len(together)
    dist.all_reduce(together)
    if rank == 0:
        _, alone = train(0, 1)
        print(f"loss {alone[-1]:.4f} alone, {together[-1] / world_size:.4f} together")
        print(f"{seconds * 1000:.1f} ms a step")


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
