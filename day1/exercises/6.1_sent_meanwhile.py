"""Exercise 6.1: gradients that travel while backward computes: a hook of your own.

Lesson:  6
Kind:    fill in, 20 minutes
Task:    The gradients of this model are averaged after backward, as in lesson 4. Let
         each travel as soon as it is ready, as DDP does. Complete watch() (TODO 1) and
         finish() (TODO 2). The weights must be as before, all messages must start
         before backward ends, and none may wait for another.
Run:     python day1/exercises/6.1_sent_meanwhile.py
Check:   python scripts/check.py 6.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LAYERS = 4
in_flight = []  # (message, gradient) of each all_reduce that nobody has waited for


def watch(model):
    """Have each gradient's sum over all ranks start as soon as it is ready."""
    # TODO 1: parameter.register_post_accumulate_grad_hook(function) has PyTorch call
    # function(parameter) when the gradient is complete. What should it start?


def finish(model):
    """Leave in each gradient its mean over all ranks, and no message in flight."""
    # TODO 2: here nothing is on its way yet, so each message begins and ends now.
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def make_model():
    """Return a model of LAYERS layers: float32 [N, 16] to float32 [N, 16]."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers)


def train(steps):
    """Train on this rank's points. Return the model, and a number for each step.

    It is how many messages are in flight at the moment when backward ends.
    """
    model = make_model()
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    counts = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), x.roll(1, 1).sin()).backward()
        counts.append(len(in_flight))
        finish(model)
        optimizer.step()
    return model, counts


def main():
    """Run on every rank: train, and compare the ranks."""
    model, counts = train(5)
    own = torch.cat([x.detach().flatten() for x in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    off = (own - first).abs().max()
    dist.all_reduce(off, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"messages in flight when backward ends: {counts}, of {2 * LAYERS}")
        print(f"weights differ from rank 0's by up to {off:.1g}")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
