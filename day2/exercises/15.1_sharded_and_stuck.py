"""Exercise 15.1: a sharded model that learns nothing.

Lesson:  15
Kind:    find the fault, 10 minutes
Symptom: Not sharded, this model learns. Sharded, its loss stays what it was in all 50
         steps, and there is no error.
Run:     python day2/exercises/15.1_sharded_and_stuck.py
Check:   python scripts/check.py 15.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def train(steps):
    """Train a new sharded model. Return it, its optimizer and the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mesh = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu")  # all ranks
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    x = torch.linspace(-2, 2, 32)[:, None]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def main():
    """Run on every rank: train for 50 steps."""
    _, _, losses = train(50)
    if dist.get_rank() == 0:
        print(f"step 0: loss {losses[0]:.4f}, step 49: loss {losses[-1]:.4f}")


# ---- Shared helpers, identical in every exercise


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
