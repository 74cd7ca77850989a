"""Solution 4.2: every epoch like the one before.

Lesson:  4
Kind:    find the fault
Symptom: The sampler shuffles, and yet each rank meets its numbers in the same order in every
         epoch, and never those of another rank.
Run:     python day1/exercises/solutions/4.2_like_yesterday.py
Check:   python scripts/check.py 4.2 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DistributedSampler


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train(numbers, epochs, batch_size, rank, world_size):
    """Estimate the mean of numbers. Return it, and for each epoch the numbers in order."""
    sampler = DistributedSampler(numbers, world_size, rank, seed=0)
    estimate, history = torch.zeros(()), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # the order comes from seed + epoch: without this from seed + 0
        seen = []
        for indices in torch.tensor(list(sampler)).split(batch_size):
            batch = numbers[indices]
            gradient = (estimate - batch).mean()
            dist.all_reduce(gradient)
            estimate = estimate - 0.1 * gradient / world_size  # the mean of the gradients
            seen += batch.tolist()
        history.append(seen)
    return estimate.item(), history


def main():
    """Run on every rank: train on 24 numbers, and let rank 0 show who met what."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    estimate, history = train(torch.arange(24.0), 3, 2, rank, world_size)
    for r, epochs in enumerate(gather(history)):
        for epoch, seen in enumerate(epochs):
            if rank == 0:
                print(f"rank {r}, epoch {epoch}:", *(f"{number:2.0f}" for number in seen))
    if rank == 0:
        print(f"estimate of the mean: {estimate:.2f}, right: 11.50")


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
