"""Exercise 0.2: a program that hangs, and how to read the error.

Lesson:  0
Kind:    find the fault, 15 minutes
Symptom: The program hangs. With gloo it would for half an hour, with NCCL for ten
         minutes; here the group has a timeout of 2 s. Then every rank stops with an
         error. Its lines begin with [rank0]: and so on. Which rank timed out, and
         which ones only say what that did to them?
Run:     python day1/exercises/0.2_waits_for_ever.py
Check:   python scripts/check.py 0.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def report(images, group):
    """Print, on rank 0 only, how many images all ranks together have seen."""
    if dist.get_rank() == 0:
        dist.all_reduce(images, group=group)
        print(f"=> {images:g} images seen by all ranks")


def main():
    """Run on every rank: count the images of all ranks."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    images = torch.tensor(1000.0 + dist.get_rank())  # images this rank has seen
    report(images, group)


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
