"""Exercise 11.2: stuck at the end of the epoch.

Lesson:  11
Kind:    find the fault
Symptom: With 2 ranks it ends. With 4 it stands still at the end of the epoch, and after a
         timeout of 2 s comes an error.
Run:     python day2/exercises/11.2_stuck_at_the_end.py
Check:   python scripts/check.py 11.2
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

CHUNKS, CHUNK_SIZE = 10, 16  # in the file that is imitated here


def batches(chunks, rank, world_size):
    """Yield the batches of this rank, one a chunk. The chunks are dealt out like cards."""
    generator = torch.Generator().manual_seed(0)
    for chunk in torch.randperm(chunks, generator=generator)[rank::world_size].tolist():
        yield torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE)


def train(chunks, rank, world_size):
    """Train a new model for one epoch. Return the number of steps."""
    group = dist.new_group(timeout=timedelta(seconds=2))  # you need not wait for half an hour
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    for numbers in batches(chunks, rank, world_size):
        x = numbers[:, None] / (chunks * CHUNK_SIZE)
        optimizer.zero_grad()
        F.mse_loss(model(x), x.sin()).backward()
        optimizer.step()
        steps += 1
    return steps


def main():
    """Run on every rank: train for one epoch."""
    rank = dist.get_rank()
    steps = train(CHUNKS, rank, dist.get_world_size())
    print(f"rank {rank}: at the end after {steps} steps", flush=True)


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
