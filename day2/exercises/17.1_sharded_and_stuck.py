"""Exercise 17.1: sharded, and nothing learned.

Lesson:  17
Kind:    find the fault
Symptom: Not sharded, this model learns. Sharded, its loss stays what it was, and no rank saves
         memory: Adam's states are as large as before.
Run:     python day2/exercises/17.1_sharded_and_stuck.py
Check:   python scripts/check.py 17.1
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(steps):
    """Train a new sharded model. Return it, its optimizer and the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
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
    launch(4)
