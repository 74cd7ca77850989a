"""Solution 14.1: send little, and lose nothing: error feedback.

Lesson:  14
Kind:    fill in, 15 minutes
Task:    To send little, a rank sends only the largest of its gradient's numbers.
         Complete largest(): what it leaves out must not be lost, but come with a later
         step.
Run:     python day2/exercises/solutions/14.1_left_out_not_lost.py
Check:   python scripts/check.py 14.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def largest(gradient, rest):
    """Return what this rank sends: like gradient, but all numbers except one are 0.

    rest, also like gradient, is what earlier steps left out. Change it in place.
    """
    # What was left out grows from step to step until it is the largest: error feedback.
    rest += gradient
    place = rest.abs().argmax()
    sent = torch.zeros_like(gradient)
    sent[place] = rest[place]
    rest[place] = 0
    return sent


def train(steps, rank):
    """Move five numbers to the mean of the targets. Return how far away they end."""
    target = torch.tensor([8.0, -4.0, 2.0, 1.0, 0.5])
    if rank == 0:
        target *= -0.5  # so the ranks have different data
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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=3"]
        options.append(__file__)
        torchrun(options)
