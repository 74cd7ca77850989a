"""Exercise 6.4: a bump after resuming.

Lesson:  6
Kind:    find the fault
Symptom: A training that was stopped goes on from its checkpoint. The weights are right, and
         yet it goes another way than one that was never stopped.
Run:     python day1/exercises/6.4_a_bump_after_resuming.py
Check:   python scripts/check.py 6.4
"""

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def begin():
    """Return a new model, wrapped, and its optimiser."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = DistributedDataParallel(nn.Linear(1, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def train(model, optimizer, steps):
    """Train on this rank's part of 64 points. Return the loss of every step."""
    x = torch.linspace(-2, 2, 64)[dist.get_rank() :: dist.get_world_size(), None]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), 0.7 * x + 0.3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(path, model, optimizer):
    """Write a checkpoint. Every rank calls this."""
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict()}, path)
    dist.barrier()  # nobody reads before the file is whole


def load(path, model, optimizer):
    """Bring a new model and its optimiser to where they were when the checkpoint was saved."""
    checkpoint = torch.load(path, weights_only=True)
    model.module.load_state_dict(checkpoint["model"])


def main():
    """Run on every rank: train without a stop, and with one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(gather(folder)[0], "checkpoint.pt")  # rank 0's folder, the same for all
        first = begin()
        train(*first, 10)
        save(path, *first)
        straight = train(*first, 10)
        second = begin()
        load(path, *second)
        resumed = train(*second, 10)
        dist.barrier()  # until all have loaded, the folder must stay
    if dist.get_rank() == 0:
        for step in range(0, 10, 3):
            print(f"step {10 + step}: loss {straight[step]:.5f}, resumed {resumed[step]:.5f}")


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
