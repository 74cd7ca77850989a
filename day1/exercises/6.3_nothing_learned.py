"""Exercise 6.3: a checkpoint that brings nothing back.

Lesson:  6
Kind:    find the fault, 15 minutes
Symptom: A model is trained with DistributedDataParallel, saved, and loaded without it.
         No error; but the loaded model is as bad as a new one.
Run:     python day1/exercises/6.3_nothing_learned.py
Check:   python scripts/check.py 6.3
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


def make_model():
    """Return a new model: float32 [N, 1] to [N, 1]."""
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def save(model, path):
    """Write the weights of a wrapped model. Every rank calls this."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()


def load(path):
    """Return a model with the weights from path, not wrapped."""
    model = make_model()
    model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return model


def main():
    """Run on every rank: train, save, load. Rank 0 compares the losses."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-2, 2, 64)[:, None]
    y = x.sin()
    for _ in range(100):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        save(model, path)
        if dist.get_rank() == 0:
            trained = F.mse_loss(model.module(x), y)
            loaded = F.mse_loss(load(path)(x), y)
            print(f"loss: trained model {trained:.4f}, loaded model {loaded:.4f}")


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
