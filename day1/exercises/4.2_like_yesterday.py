"""Exercise 4.2: each epoch repeats the one before.

Lesson:  4
Kind:    find the fault, 10 minutes
Symptom: The sampler shuffles, and yet each rank meets its numbers in the same order in
         every epoch, and never another rank's numbers.
Run:     python day1/exercises/4.2_like_yesterday.py
Check:   python scripts/check.py 4.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


def train(numbers, epochs, batch_size, rank, world_size):
    """Estimate the mean of numbers. Return it, and the numbers of each epoch."""
    sampler = DistributedSampler(numbers, world_size, rank, seed=0)
    estimate = torch.zeros(())
    history = [[] for _ in range(epochs)]
    for epoch in range(epochs):
        for indices in torch.tensor(list(sampler)).split(batch_size):
            batch = numbers[indices]
            gradient = (estimate - batch).mean()
            dist.all_reduce(gradient)
            gradient /= world_size  # the mean of the gradients
            estimate = estimate - 0.1 * gradient
            history[epoch] += batch.tolist()
    return estimate.item(), history


def main():
    """Run on every rank: train on 24 numbers, and let rank 0 show who met what."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    estimate, history = train(torch.arange(24.0), 3, 2, rank, world_size)
    for r, epochs in enumerate(gather(history)):
        for epoch, seen in enumerate(epochs):
            if rank == 0:
                numbers = " ".join(f"{number:2.0f}" for number in seen)
                print(f"rank {r}, epoch {epoch}: {numbers}")
    if rank == 0:
        print(f"estimate of the mean: {estimate:.2f}, right: 11.50")


# ---- Shared helpers, identical in every exercise


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
