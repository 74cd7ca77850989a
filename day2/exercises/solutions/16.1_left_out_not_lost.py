"""Solution 16.1: what is left out comes later.

Lesson:  16
Kind:    fill in
Task:    To send little, a rank sends only the largest of its gradient's numbers. Complete
         largest(): what it leaves out must not be lost, but come with a later step.
Run:     python day2/exercises/solutions/16.1_left_out_not_lost.py
Check:   python scripts/check.py 16.1 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def largest(gradient, rest):
    """Return what this rank sends: a tensor like gradient in which all numbers but one are 0.

    rest, a tensor like gradient, is what earlier steps have left out. Change it in place.
    """
    # What was left out grows from step to step until it is the largest: error feedback.
    rest += gradient
    place = rest.abs().argmax()
    sent = torch.zeros_like(gradient)
    sent[place] = rest[place]
    rest[place] = 0
    return sent


def train(steps, rank):
    """Move five numbers to the mean of the ranks' targets. Return how far they end from it."""
    target = torch.tensor([8.0, -4.0, 2.0, 1.0, 0.5]) * (1 if rank else -0.5)  # other data
    numbers, rest, best = torch.zeros(5), torch.zeros(5), target.clone()
    for _ in range(steps):
        sent = largest(numbers - target, rest)
        dist.all_reduce(sent)
        numbers -= 0.02 * sent / dist.get_world_size()
    dist.all_reduce(best)
    return (numbers - best / dist.get_world_size()).abs().max().item()


def main():
    """Run on every rank: train for 300 steps."""
    gap = train(300, dist.get_rank())
    if dist.get_rank() == 0:
        print(f"after 300 steps: {gap:.2f} from the best numbers")


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
    launch(3)
