"""Exercise 14.1: the gradient of a table, row by row.

Lesson:  14
Kind:    fill in
Task:    Complete average_rows(): each rank has used some rows of a table and knows their
         gradients. In the end every rank has those of all ranks, and none sends the table.
Run:     python day2/exercises/14.1_rows_of_a_table.py
Check:   python scripts/check.py 14.1
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


def average_rows(rows, values):
    """Average the gradient of a table over the ranks. Return the rows and values of all of them.

    rows: int64 [N], the numbers of the rows that this rank has used; N is equal on all ranks.
    values: float32 [N, D], their gradients. Where the same row comes several times, in the result
    too, its values count together.
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
