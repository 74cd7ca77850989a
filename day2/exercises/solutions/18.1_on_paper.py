"""Solution 18.1: a prediction that is too good.

Lesson:  18
Kind:    find the fault, 10 minutes
Symptom: The program predicts that two nodes are 2.0 times as fast as one. On the
         cluster, with 10 Gbit/s between its nodes, they were slower than one.
Run:     python day2/exercises/solutions/18.1_on_paper.py
Check:   python scripts/check.py 18.1 --solution
"""

import os
import time
from datetime import timedelta

import torch.distributed as dist

FORWARD, BACKWARD = 200.0, 400.0  # ms, measured on one node
PARAMETERS = 345e6  # each is float32, and so is its gradient


def message_ms(parameters, nodes, gigabits_per_second):
    """Return the ms that an all_reduce of the gradients takes in a ring of nodes."""
    numbers = 2 * (nodes - 1) / nodes * parameters
    # A number has 4 bytes, a byte 8 bits. Links are sold in bits, files and tensors
    # are counted in bytes.
    gigabits = 8 * 4 * numbers / 1e9
    return 1000 * gigabits / gigabits_per_second


def step_ms(parameters, nodes, gigabits_per_second):
    """Return the ms of a step: gradients are sent while backward still computes."""
    message = message_ms(parameters, nodes, gigabits_per_second)
    return FORWARD + max(BACKWARD, message)


def main():
    """Predict for one and for two nodes."""
    one = step_ms(PARAMETERS, 1, 10)
    two = step_ms(PARAMETERS, 2, 10)
    if dist.get_rank() == 0:
        times = f"a step takes {one:.0f} ms on one node, {two:.0f} on two"
        print(f"{times}: {2 * one / two:.1f} times as fast")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options.append(__file__)
        torchrun(options)
