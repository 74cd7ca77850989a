"""Exercise 11.3: every worker of every rank its own part.

Lesson:  11
Kind:    fill in
Task:    Complete __iter__(): each chunk must come once, over all ranks and all their workers.
         As given, each worker of each rank reads all of them.
Run:     python day2/exercises/11.3_share_among_workers.py
Check:   python scripts/check.py 11.3
"""

import os
import sys
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, IterableDataset


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Chunks(IterableDataset):
    """The numbers of the chunks, 0 to count - 1, that this rank is to read."""

    def __init__(self, count, rank, world_size):
        self.count, self.rank, self.world_size = count, rank, world_size

    def __iter__(self):
        # TODO: this is worker number info.id of info.num_workers, on rank self.rank of
        # self.world_size. info = get_worker_info() is None where the rank reads without workers.
        yield from range(self.count)


def main():
    """Run on every rank: read 8 chunks with 2 workers. Rank 0 shows who got which."""
    chunks = Chunks(8, dist.get_rank(), dist.get_world_size())
    # Forked workers start at once. That is not safe on a Mac.
    context = "fork" if sys.platform == "linux" else None
    loader = DataLoader(chunks, batch_size=None, num_workers=2, multiprocessing_context=context)
    for rank, numbers in enumerate(gather(list(loader))):
        if dist.get_rank() == 0:
            print(f"rank {rank}, 2 workers: chunks", *numbers)


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
    launch(2)
