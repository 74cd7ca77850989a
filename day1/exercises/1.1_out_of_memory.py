"""Exercise 1.1: out of memory, on a node with four GPUs.

Lesson:  1
Kind:    find the fault
Symptom: The node has four GPUs, but the first one is out of memory and three are idle.
         (The GPUs are imitated: the program runs anywhere. A model takes 30 GB, a GPU has 80.)
Run:     python day1/exercises/1.1_out_of_memory.py
Check:   python scripts/check.py 1.1
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GPUS = 4  # so many has the imitated node
MODEL, MEMORY = 30, 80  # GB


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def choose_device(local_rank):
    """Return the device of the rank with this number on its node. The node has GPUS of them."""
    return torch.device("cuda:0")


def main():
    """Run on every rank: choose a device, put a model there. Rank 0 shows the devices."""
    local_rank = dist.get_rank()  # there is only one node
    devices = [device.index or 0 for device in gather(choose_device(local_rank))]
    if local_rank == 0:
        for gpu in range(GPUS):
            used = MODEL * devices.count(gpu)
            state = "OUT OF MEMORY" if used > MEMORY else "ok" if used else "idle"
            print(f"GPU {gpu}: models {devices.count(gpu)}, {used} of {MEMORY} GB: {state}")


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
