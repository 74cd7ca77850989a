"""Exercise 10.1: an accuracy that depends on the number of ranks.

Lesson:  10
Kind:    find the fault, 15 minutes
Symptom: The same model, the same 10 test images: 80 % are right with 1, 2 or 5 ranks,
         but only 67 % with 3 or 4.
Run:     python day2/exercises/10.1_another_accuracy.py
Check:   python scripts/check.py 10.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


def evaluate(model, images, labels, rank, world_size):
    """Return how many images are right and how many were looked at, over all ranks."""
    sampler = DistributedSampler(images, world_size, rank, shuffle=False)
    mine = list(sampler)
    right = (model(images[mine]).argmax(1) == labels[mine]).sum().item()
    counts = torch.tensor([right, len(mine)])
    dist.all_reduce(counts)
    return counts.tolist()


def main():
    """Run on every rank: evaluate a model that is wrong about the first two images."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    labels = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
    images = torch.tensor([[1.0, 0.0]]).repeat(10, 1)  # two numbers each, and the model
    right, count = evaluate(torch.nn.Identity(), images, labels, rank, world_size)
    if rank == 0:
        print(f"=> {right / count:.1%} right: {right} of {count} images")


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
