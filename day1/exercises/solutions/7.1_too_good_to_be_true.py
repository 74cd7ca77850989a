"""Solution 7.1: a speed too good to be true.

Lesson:  7
Kind:    find the fault
Symptom: A step takes 10 ms. The program measures next to nothing. (The GPU is imitated: like
         a real one it only notes the work, and its first step takes 200 ms more.)
Run:     python day1/exercises/solutions/7.1_too_good_to_be_true.py
Check:   python scripts/check.py 7.1 --solution
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Gpu:
    """Imitates a GPU: it works on while the program goes ahead."""

    def __init__(self):
        self.queue, self.last = ThreadPoolExecutor(1), None

    def step(self):
        """Note one step of training. The first one also allocates memory and chooses kernels."""
        self.last = self.queue.submit(time.sleep, 0.01 if self.last else 0.21)

    def synchronize(self):
        """Wait until all that was noted is done."""
        if self.last:
            self.last.result()


def time_step(gpu, steps=20):
    """Return the seconds that one step takes when training has been running for a while."""
    gpu.step()  # warm-up: the first step is like no other
    gpu.synchronize()  # and what was noted before must not be timed
    begin = time.perf_counter()
    for _ in range(steps):
        gpu.step()
    gpu.synchronize()  # the clock is read when the work is done, not when it is noted
    return (time.perf_counter() - begin) / steps


def main():
    """Run on every rank: time a step."""
    for rank, seconds in enumerate(gather(time_step(Gpu()))):
        if dist.get_rank() == 0:
            print(f"rank {rank}: {1000 * seconds:.3f} ms a step")


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
