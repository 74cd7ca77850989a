"""Solution 13.2: fp16, clipped, and nothing learned.

Lesson:  13
Kind:    find the fault
Symptom: Gradients are clipped: one longer than 1 is shortened to 1. In fp32 this learns. Since
         the loss is scaled for fp16, it does not move, and nothing complains.
Run:     python day2/exercises/solutions/13.2_clipped_to_nothing.py
Check:   python scripts/check.py 13.2 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def step(model, optimizer, scaler, x, y):
    """Take one step, no longer than the learning rate. Return the loss."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    # Back to their true size first. step() knows then that this is done.
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def main():
    """Run on every rank: train y = 2 x with a scaled loss, and with one that is not."""
    x = torch.linspace(-1, 1, 16)[:, None]
    for enabled in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        losses = [step(model, optimizer, scaler, x, 2 * x) for _ in range(50)]
        if dist.get_rank() == 0:
            name = "scaled" if enabled else "not scaled"
            print(f"{name}: loss {losses[0]:.4f} in step 0, {losses[-1]:.4f} in step 49")


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
