"""Exercise 16.4: column-wise, row-wise, and the two functions between them.

Lesson:  16
Kind:    fill in, 25 minutes
Task:    Two ranks share each block's two layers. Complete Copy (TODO 1) and AddUp
         (TODO 2, 3), which send, and ColumnWise (TODO 4) and RowWise (TODO 5, 6), which
         keep a rank's part. The losses must be one process's, a rank keeps half of the
         matrices, and each block sends its activations once in forward. In backward,
         each but the first sends the gradients of its input once.
Run:     python day2/exercises/16.4_columns_then_rows.py
Check:   python scripts/check.py 16.4
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH = 16  # numbers in a row of x


class Copy(torch.autograd.Function):
    """Into column-wise layers: all ranks have the same x, and pass it on."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        # TODO 1: which part of the gradient of x does this rank know?
        return gradient


class AddUp(torch.autograd.Function):
    """Out of row-wise layers: the ranks' parts become the same y on all ranks."""

    @staticmethod
    def forward(context, part):
        # TODO 2: this is one rank's part of y.
        return part.view_as(part)

    @staticmethod
    def backward(context, gradient):
        # TODO 3: all ranks go on with the same y. Which gradient does each part need?
        return gradient.clone()


class ColumnWise(nn.Module):
    """This rank's part of a linear layer: some of the outputs, from all inputs."""

    def __init__(self, linear):
        super().__init__()
        # TODO 4: this is the whole layer. own_part() cuts.
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(Copy.apply(x), self.weight, self.bias)


class RowWise(nn.Module):
    """This rank's part of a linear layer: all outputs, from the inputs it has."""

    def __init__(self, linear):
        super().__init__()
        # TODO 5: so is this.
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x):
        # TODO 6: how often is the bias added?
        return AddUp.apply(F.linear(x, self.weight, self.bias))


class Block(nn.Module):
    """Two layers, beside which x passes: float32 [N, WIDTH] to the same shape."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def own_part(parameter, dim):
    """Return this rank's part of a parameter, cut along dim."""
    parts = parameter.detach().chunk(dist.get_world_size(), dim)
    return nn.Parameter(parts[dist.get_rank()].clone())


def make_model(together):
    """Return two blocks: their layers shared among the ranks, or whole."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if together:
        for block in model:
            block.up = ColumnWise(block.up)
            block.down = RowWise(block.down)
    return model


def train(model, steps):
    """Train always on the same points. Return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.roll(1, 1).sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Run on every rank: train together, then alone, and compare."""
    model, whole = make_model(together=True), make_model(together=False)
    kept, all_numbers = [sum(x.numel() for x in y.parameters()) for y in (model, whole)]
    losses, right = train(model, 20), train(whole, 20)
    if dist.get_rank() == 0:
        print(f"numbers that rank 0 keeps: {kept:,} of {all_numbers:,}")
        for step in (0, 1, 19):
            print(f"step {step}: loss {losses[step]:.6f}, alone {right[step]:.6f}")


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
