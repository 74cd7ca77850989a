"""Exercise 10.1: the accuracy depends on the number of ranks.

Lesson:  10
Kind:    find the fault
Symptom: The same model, the same 10 test images: 80 % are right with 1, 2 or 5 ranks, but
         only 67 % with 3 or 4.
Run:     python day2/exercises/10.1_another_accuracy.py
Check:   python scripts/check.py 10.1
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
