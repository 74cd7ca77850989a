"""Lesson 0: several processes, one sum.

Builds on: nothing
New here:  rank, world size, process group, all_reduce
Run:       python day1/0_torch_dist.py [processes]
           torchrun --nproc-per-node 4 day1/0_torch_dist.py
Look for:  => every rank holds ...; the sum 0+1+2+3 is ...: ok
Try next:  replace SUM by MAX or PRODUCT; run it with 1, 2 and 8 processes.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world_size, url="env://"):  # env://: torchrun has set variables
    """Run as one of the processes: the same code in each, told apart by the rank."""
    wait = timedelta(seconds=60)  # at most; the default is half an hour
    dist.init_process_group("gloo", url, rank=rank, world_size=world_size, timeout=wait)
    value = torch.tensor(float(rank))
    # Every rank gives its value, and every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Their lines would come in any order, so all ranks get all rows, and rank 0 prints.
    rows = [None] * world_size
    dist.all_gather_object(rows, (os.getpid(), value.item()))
    expected = sum(range(world_size))
    correct = all(after == expected for _, after in rows)
    if rank == 0:
        for r, (pid, after) in enumerate(rows):
            who = f"rank {r} of {world_size} (process {pid})"
            print(f"{who}: {r} before, {after:g} after")
        terms = "+".join(str(rank) for rank in range(world_size))
        held = ", ".join(f"{after:g}" for after in sorted({after for _, after in rows}))
        verdict = "ok" if correct else "WRONG"
        print(f"=> every rank holds {held}; the sum {terms} is {expected}: {verdict}")
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it
    dist.destroy_process_group()
    sys.exit(0 if correct else 1)


def start_processes(world_size):
    """Start the processes on this machine, and wait for them."""
    method = "fork" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:  # no other user can open it
        given = (world_size, f"file://{folder}/ranks")  # a file in which they meet
        try:  # each process calls run(rank, world_size, url), with its own rank
            mp.start_processes(run, given, world_size, daemon=True, start_method=method)
        except mp.ProcessExitedException as error:
            sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Several processes, one sum.")
    parser.add_argument("processes", type=int, nargs="?", help="(4)")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", args.processes or 4))
    if not 0 < ranks <= 1000 or args.processes not in (None, ranks):
        parser.error("processes must be 1 to 1000, or WORLD_SIZE, which torchrun sets")
    if "RANK" in os.environ:  # torchrun has started this process, and set where to meet
        run(int(os.environ["RANK"]), ranks)
    else:
        start_processes(ranks)
