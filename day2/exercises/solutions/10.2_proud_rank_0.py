"""Solution 10.2: rank 0 is proud.

Lesson:  10
Kind:    find the fault
Symptom: Rank 0 reports 100 % right. The same model, evaluated by one process, gets 6 of 11.
Run:     python day2/exercises/solutions/10.2_proud_rank_0.py
Check:   python scripts/check.py 10.2 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def evaluate(model, images, labels, rank, world_size):
    """Return the share of all images, from 0 to 1, that the model gets right. On every rank."""
    mine = slice(rank, None, world_size)  # the parts may differ in size
    right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    counts = torch.stack([right, torch.tensor(len(labels[mine]))])
    dist.all_reduce(counts)  # counts, not shares: a mean of shares is wrong for unequal parts
    return (counts[0] / counts[1]).item()


def main():
    """Run on every rank: evaluate a model that says 0 to all images."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    labels = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0])
    images = torch.tensor([[1.0, 0.0]]).repeat(11, 1)
    shares = gather(evaluate(torch.nn.Identity(), images, labels, rank, world_size))
    if rank == 0:
        print(f"=> {shares[0]:.1%} right, says rank 0")
        print("the others say", *(f"{share:.1%}" for share in shares[1:]))


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
