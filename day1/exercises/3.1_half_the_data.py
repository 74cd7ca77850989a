"""Exercise 3.1: some ranks get half the data.

Lesson:  3
Kind:    find the fault
Symptom: 10,000 labels lie in an archive. Whoever comes first unpacks them. Rank 0 gets all,
         another rank fewer, and no rank complains. (Unpacking is slowed down so that you see it.)
Run:     python day1/exercises/3.1_half_the_data.py
Check:   python scripts/check.py 3.1
"""

import gzip
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DATA = next(p for p in Path(__file__).resolve().parents if (p / "data").exists()) / "data"


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def unpack(archive, path):
    """Unpack a .gz file, slowly, as on a disk that many use at once."""
    with gzip.open(archive) as source, path.open("wb") as target:
        while piece := source.read(1000):
            time.sleep(0.05)
            target.write(piece)
            target.flush()


def load_labels(archive, path):
    """Return the labels, uint8 [10000]. Every rank calls this. They are unpacked to path."""
    if not path.exists():
        unpack(archive, path)
    return torch.tensor(list(path.read_bytes()[8:]), dtype=torch.uint8)  # 8 bytes are no labels


def main():
    """Run on every rank: load the labels, and let rank 0 show how many each rank got."""
    rank = dist.get_rank()
    archive = DATA / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(gather(folder)[0], "labels")  # rank 0's folder, the same for all
        time.sleep(0.15 * rank)  # ranks never arrive at the same moment
        counts = gather(len(load_labels(archive, path)))
    for r, count in enumerate(counts):
        if rank == 0:
            print(f"rank {r}: {count:,} of 10,000 labels")


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
