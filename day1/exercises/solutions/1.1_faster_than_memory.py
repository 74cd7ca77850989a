"""Solution 1.1: a bandwidth too good to be true.

Lesson:  1
Kind:    find the fault, 10 minutes
Symptom: An all_reduce of 4 MB on this machine seems to be so fast that no memory could
         keep up. And 400 kB take as long as 4 MB.
Run:     python day1/exercises/solutions/1.1_faster_than_memory.py
Check:   python scripts/check.py 1.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def time_all_reduce(numbers, repeats=5):
    """Return the seconds that one all_reduce of this many float32 numbers takes."""
    tensors = [torch.ones(numbers) for _ in range(repeats)]
    dist.all_reduce(tensors[0])  # the first call sets up connections: not timed
    dist.barrier()
    begin = time.perf_counter()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    # Only now is the work done. Before, it was only asked for.
    seconds = time.perf_counter() - begin
    return seconds / repeats


def main():
    """Run on every rank: time two sizes, and let rank 0 show the speed."""
    for numbers in (100_000, 1_000_000):
        seconds = time_all_reduce(numbers)
        if dist.get_rank() == 0:
            speed = numbers * 4 / seconds / 1e9
            print(f"{numbers * 4:,} bytes: {seconds * 1e3:.3f} ms, {speed:.1f} GB/s")


# ---- Shared helpers, identical in every exercise


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
