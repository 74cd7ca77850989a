"""Exercise 2.1: one epoch of training.

Lesson:  2
Kind:    fill in
Task:    Complete train_one_epoch(): one step of the optimiser for every batch, and at
         the end the mean loss over all numbers. The last batch is smaller than the others.
Run:     python day1/exercises/2.1_one_epoch.py
Check:   python scripts/check.py 2.1
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def train_one_epoch(model, optimizer, batches):
    """Train on each batch once. Return the mean loss over all points, not over the batches."""
    total, count = 0.0, 0
    for x, y in batches:
        loss = F.mse_loss(model(x), y)  # the mean over this batch
        # TODO 1: compute the gradients of this batch alone, let the optimiser take its step.
        # TODO 2: add to total and to count so that every point weighs the same.
        total += loss.item()
        count += 1
    return total / count


def main():
    """Run on one rank: fit a straight line to 100 points in batches of 16."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(100, 1)
    y = 0.7 * x + 0.3
    for epoch in range(5):
        loss = train_one_epoch(model, optimizer, list(zip(x.split(16), y.split(16))))
        print(f"epoch {epoch}: loss {loss:.5f}")


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
    launch(1)
