"""Solution 0.2: one rank waits for ever.

Lesson:  0
Kind:    find the fault
Symptom: The program stands still. It would for half an hour; here the group has a
         timeout of 2 s. Then comes an error. Read its last line, and from which rank it is.
Run:     python day1/exercises/solutions/0.2_waits_for_ever.py
Check:   python scripts/check.py 0.2 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def report(images, group):
    """Print, on rank 0 only, how many images all ranks together have seen."""
    # Every rank must take part. Only the printing is for rank 0.
    dist.all_reduce(images, group=group)
    if dist.get_rank() == 0:
        print(f"=> {images:g} images seen by all ranks")


def main():
    """Run on every rank: count the images of all ranks."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    images = torch.tensor(1000.0 + dist.get_rank())  # so many images has this rank seen
    report(images, group)


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
