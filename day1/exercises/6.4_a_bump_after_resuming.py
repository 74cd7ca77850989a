"""Exercise 6.4: training that continues differently after a stop.

Lesson:  6
Kind:    find the fault, 15 minutes
Symptom: A training that was stopped resumes from its checkpoint. The weights are right,
         and yet it takes a different path than one that was never stopped.
Run:     python day1/exercises/6.4_a_bump_after_resuming.py
Check:   python scripts/check.py 6.4
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def begin():
    """Return a new model, wrapped, and its optimizer."""
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
    dist.barrier()


def load(path, model, optimizer):
    """Bring a new model and its optimizer to where they were at save."""
    checkpoint = torch.load(path, weights_only=True)
    model.module.load_state_dict(checkpoint["model"])


def main():
    """Run on every rank: train without a stop, and with one."""
    with tempfile.TemporaryDirectory() as folder:
        # Rank 0's folder, the same for all.
        path = Path(gather(folder)[0], "checkpoint.pt")
        model, optimizer = begin()
        train(model, optimizer, 10)
        save(path, model, optimizer)
        straight = train(model, optimizer, 10)
        model, optimizer = begin()
        load(path, model, optimizer)
        resumed = train(model, optimizer, 10)
        dist.barrier()  # until all have loaded, the folder must stay
    if dist.get_rank() == 0:
        for step in range(0, 10, 3):
            pair = f"loss {straight[step]:.5f}, resumed {resumed[step]:.5f}"
            print(f"step {10 + step}: {pair}")


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
