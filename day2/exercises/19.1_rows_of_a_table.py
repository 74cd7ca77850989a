"""Exercise 19.1: a sparse gradient, averaged over the ranks.

Lesson:  19
Kind:    fill in, 15 minutes
Task:    Complete average_rows(): each rank has used some rows of a table and knows
         their gradients. In the end every rank has the gradients of all, but none sends
         the table.
Run:     python day2/exercises/19.1_rows_of_a_table.py
Check:   python scripts/check.py 19.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def average_rows(rows, values):
    """Average a table's gradient over the ranks. Return the rows and values of all.

    rows: int64 [N], the rows that this rank has used; N is equal on all ranks.
    values: float32 [N, D], their gradients. A row may come several times, in the result
    too: then its values are added up.
    """
    # TODO: get the rows and the values of the other ranks, and average over the ranks.
    return rows, values


def main():
    """Run on every rank: each has used two rows of a table of five."""
    rank = dist.get_rank()
    rows, values = torch.tensor([rank, 4]), torch.full((2, 1), 6.0 * (rank + 1))
    rows, values = average_rows(rows, values)
    table = torch.zeros(5, 1).index_add_(0, rows, values)
    for r, column in enumerate(gather(table[:, 0].tolist())):
        if rank == 0:
            print(f"rank {r}: the gradient of the table is {column}")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=3"]
        options.append(__file__)
        torchrun(options)
