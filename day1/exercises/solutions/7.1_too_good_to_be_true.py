"""Solution 7.1: a time too short to be true.

Lesson:  7
Kind:    find the fault, 10 minutes
Symptom: A step takes 10 ms, and only the first one 200 ms more. The program measures
         next to nothing. (The GPU is simulated.)
Run:     python day1/exercises/solutions/7.1_too_good_to_be_true.py
Check:   python scripts/check.py 7.1 --solution
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


def time_step(gpu, steps=20):
    """Return the seconds that one step takes, after the first ones."""
    gpu.step()  # warm-up: the first step takes longer
    gpu.synchronize()  # and work noted before must not be timed
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


class Gpu:
    """Simulates a GPU: it works on while the program goes ahead."""

    def __init__(self):
        self.queue = ThreadPoolExecutor(1)
        self.last = None

    def step(self):
        """Note one step of training. The first one takes longer."""
        self.last = self.queue.submit(time.sleep, 0.01 if self.last else 0.21)

    def synchronize(self):
        """Wait until all that was noted is done."""
        if self.last:
            self.last.result()


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
