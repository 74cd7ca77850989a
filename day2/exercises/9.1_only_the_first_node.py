"""Exercise 9.1: it works on the first node only.

Lesson:  9
Kind:    find the fault
Symptom: On one node all is well. On two nodes with two GPUs each, the ranks of the second
         node ask for GPUs that do not exist. (The nodes are imitated: it runs anywhere.)
Run:     python day2/exercises/9.1_only_the_first_node.py
Check:   python scripts/check.py 9.1
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GPUS = 2  # so many has each imitated node


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def choose_device():
    """Return the device of this rank, as the variables of torchrun or Slurm say."""
    return torch.device("cuda", int(os.environ["RANK"]))


def main():
    """Run on every rank: choose a device. Rank 0 shows who got which."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % GPUS), LOCAL_WORLD_SIZE=str(GPUS))
    for r, device in enumerate(gather(choose_device())):
        if rank == 0:
            state = "ok" if device.index < GPUS else "THERE IS NO SUCH GPU"
            print(f"node {r // GPUS}, rank {r}: {device}: {state}")


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
