"""Exercise 6.3: the checkpoint knows nothing.

Lesson:  6
Kind:    find the fault
Symptom: A model is trained with DistributedDataParallel, saved, and loaded without it. No
         error; but the loaded model is as bad as a new one.
Run:     python day1/exercises/6.3_nothing_learned.py
Check:   python scripts/check.py 6.3
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


def make_model():
    """Return a new model: float32 [N, 1] to [N, 1]."""
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def save(model, path):
    """Write the weights of a model that DistributedDataParallel wraps. Every rank calls this."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()  # nobody reads before the file is whole


def load(path):
    """Return a model with the weights from path, for use without DistributedDataParallel."""
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
            trained, loaded = F.mse_loss(model.module(x), y), F.mse_loss(load(path)(x), y)
            print(f"loss of the trained model {trained:.4f}, of the loaded one {loaded:.4f}")


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
