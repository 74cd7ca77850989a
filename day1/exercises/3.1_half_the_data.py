"""Exercise 3.1: some ranks get half the data.

Lesson:  3
Kind:    find the fault, 15 minutes
Symptom: The first rank that needs the data downloads them. Rank 0 gets all 10,000
         labels, another rank fewer, and no rank complains. (The download is simulated,
         and slow, so that you see it.)
Run:     python day1/exercises/3.1_half_the_data.py
Check:   python scripts/check.py 3.1
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def load_labels(path):
    """Return the labels, uint8 [10000]. Every rank calls this."""
    if not path.exists():
        download(path)
    return torch.tensor(list(path.read_bytes()), dtype=torch.uint8)


def main():
    """Run on every rank: load the labels. Rank 0 shows how many each rank got."""
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(gather(folder)[0], "labels")  # rank 0's folder, the same for all
        time.sleep(0.15 * rank)  # ranks never arrive at the same moment
        counts = gather(len(load_labels(path)))
    if rank == 0:
        for r, count in enumerate(counts):
            print(f"rank {r}: {count:,} of 10,000 labels")


def download(path):
    """Write 10,000 labels to path, slowly: the next label is the next digit."""
    with path.open("wb") as file:
        for _ in range(10):
            time.sleep(0.05)
            file.write(bytes(range(10)) * 100)
            file.flush()


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
