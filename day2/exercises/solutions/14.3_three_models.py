"""Solution 14.3: local SGD that ends with as many models as ranks.

Lesson:  14
Kind:    find the fault, 10 minutes
Symptom: Local SGD: three ranks train alone, and every 8 steps they average their
         parameters. In the end all should have the same model, with a weight of 1.92.
         But each has a different one. Leave STEPS and PERIOD as they are, and do not
         average more often than needed.
Run:     python day2/exercises/solutions/14.3_three_models.py
Check:   python scripts/check.py 14.3 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

STEPS = 20
PERIOD = 8  # steps between two means


def average_parameters(model):
    """Set the parameters to their mean over all ranks. Every rank must call this."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def train(rank):
    """Train by local SGD, each rank on its own data. Return the model."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.linspace(-2, 2, 16)[:, None]
    y = (rank + 1) * x  # the ranks disagree: 1, 2, 3. Their mean is 2
    for step in range(1, STEPS + 1):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % PERIOD == 0:
            average_parameters(model)
    if STEPS % PERIOD != 0:
        average_parameters(model)  # what came after the last mean
    return model


def main():
    """Run on every rank: train, then show the weight of each."""
    weight = train(dist.get_rank()).weight.item()
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, weight)
    if dist.get_rank() == 0:
        print("weights:", ", ".join(f"{number:.2f}" for number in weights))


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=3"]
        options.append(__file__)
        torchrun(options)
