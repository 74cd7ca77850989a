"""Exercise 8.2: raise the learning rate step by step.

Lesson:  8
Kind:    fill in
Task:    Complete factor(): 1 in step 0, then rising in a straight line, world_size in step
         warm_up and ever after.
         Lesson 8 leaves this to LinearLR; LambdaLR multiplies by what your function returns.
Run:     python day1/exercises/8.2_warm_up.py
Check:   python scripts/check.py 8.2
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

LR = 0.01  # for one process


def factor(step, warm_up, world_size):
    """Return by how much the learning rate of one process is multiplied in this step."""
    # TODO: a straight line from 1 to world_size, and flat from step warm_up on.
    return float(world_size)


def learning_rates(steps, warm_up, world_size):
    """Return the learning rates of so many steps of training."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
    scheduler = LambdaLR(optimizer, lambda step: factor(step, warm_up, world_size))
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def main():
    """Run on every rank: show the learning rates of 8 steps, 5 of them warm-up."""
    rates = learning_rates(8, 5, dist.get_world_size())
    if dist.get_rank() == 0:
        print("learning rates:", *(f"{rate:.3f}" for rate in rates))


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
