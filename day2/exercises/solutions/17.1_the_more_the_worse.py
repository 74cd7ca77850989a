"""Solution 17.1: a pipeline that learns worse with more micro-batches.

Lesson:  17
Kind:    find the fault, 10 minutes
Symptom: A pipeline of two stages. With one micro-batch it learns. The same batches in
         eight micro-batches begin with the same loss, and end with nan.
Run:     python day2/exercises/solutions/17.1_the_more_the_worse.py
Check:   python scripts/check.py 17.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def build_stage(rank):
    """Return this rank's half of the model: float32 [N, 4] to [N, 32] to [N, 1]."""
    torch.manual_seed(rank)
    if rank == 0:
        return nn.Sequential(nn.Linear(4, 32), nn.Tanh())
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def step(stage, x, y, micro_batches):
    """Compute the gradients of a batch on this stage. Return the loss, on rank 1."""
    loss = 0.0
    held = []
    for part, target in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
        if dist.get_rank() == 0:
            out = stage(part)
            dist.send(out.detach(), 1)
            held.append((part, out))
        else:
            arrived = torch.empty(len(part), 32)
            dist.recv(arrived, 0)
            arrived.requires_grad_()
            # backward adds up over the micro-batches, so that a mean must be divided.
            out = F.mse_loss(stage(arrived), target) / micro_batches
            held.append((arrived, out))
            loss += out.item()
    for arrived, out in held:
        if dist.get_rank() == 0:
            gradient = torch.empty_like(out)
            dist.recv(gradient, 1)
            out.backward(gradient)
        else:
            out.backward()
            dist.send(arrived.grad, 0)
    return loss


def train(micro_batches, steps):
    """Train a new model on batches of 64 points. Return the losses, on both ranks."""
    stage = build_stage(dist.get_rank())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 4, generator=generator)
        y = x.sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        losses.append(step(stage, x, y, micro_batches))
        optimizer.step()
    losses = torch.tensor(losses)
    dist.broadcast(losses, 1)  # rank 0 does not know them
    return losses.tolist()


def main():
    """Run on every rank: train with one micro-batch, then with eight."""
    for micro_batches in (1, 8):
        losses = train(micro_batches, 50)
        if dist.get_rank() == 0:
            text = f"step 0: loss {losses[0]:.4f}, step 49: loss {losses[-1]:.4f}"
            print(f"micro-batches: {micro_batches}, {text}")


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
