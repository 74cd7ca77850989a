"""Solution 16.1: two ranks share two layers, and don't learn what one rank learns.

Lesson:  16
Kind:    find the fault, 10 minutes
Symptom: Two ranks share two layers. In step 0 the loss equals one process's, to the
         last printed digit. Later, the losses differ, but there is no error.
Run:     python day2/exercises/solutions/16.1_equal_at_first.py
Check:   python scripts/check.py 16.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class AddUp(torch.autograd.Function):
    """Add up what all ranks have. Backward copies."""

    @staticmethod
    def forward(context, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient


class RowWise(nn.Module):
    """Some rows of a linear layer's matrix, for the inputs that this rank has."""

    def __init__(self, linear):
        super().__init__()
        self.weight = own_part(linear.weight, 1)
        self.bias = linear.bias

    def forward(self, x):
        part = F.linear(x, self.weight)
        return AddUp.apply(part) + self.bias  # once, so after adding up


def own_part(parameter, dim):
    """Return this rank's part of a parameter, cut along dim."""
    parts = parameter.detach().chunk(dist.get_world_size(), dim)
    return nn.Parameter(parts[dist.get_rank()].clone())


def split(model):
    """Leave this rank its part: of the first layer columns, of the second one rows."""
    up, _, down = model
    up.weight = own_part(up.weight, 0)
    up.bias = own_part(up.bias, 0)
    model[2] = RowWise(down)


def train(steps, together):
    """Train a new model, split among the ranks or not. Return the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    nn.init.zeros_(model[2].bias)
    if together:
        split(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.linspace(-2, 2, 32)[:, None]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sin() + 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Run on every rank: train together, then alone."""
    shared = train(20, together=True)
    alone = train(20, together=False)
    if dist.get_rank() == 0:
        for step in (0, 1, 19):
            print(f"step {step}: loss {shared[step]:.4f}, alone {alone[step]:.4f}")


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
