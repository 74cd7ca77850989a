"""Exercise 5.1: a profiler that leaves no trace.

Lesson:  5
Kind:    find the fault, 10 minutes
Symptom: The training runs, the profiler is on, there is no error. But the folder for
         the traces stays empty.
Run:     python day1/exercises/5.1_no_trace.py
Check:   python scripts/check.py 5.1
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule, tensorboard_trace_handler

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # hides the profiler's messages about itself


def record(folder):
    """Train five steps. Write a trace of the last three, one file per rank."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = schedule(wait=0, warmup=2, active=3, repeat=1)
    writer = tensorboard_trace_handler(
        str(folder), worker_name=f"rank{dist.get_rank()}"
    )
    with profile(schedule=plan, on_trace_ready=writer, acc_events=True):
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(32, 64)), torch.zeros(32, 64)).backward()
            optimizer.step()


def main():
    """Run on every rank: record, and let rank 0 show which traces there are."""
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        traces = gather(sorted(path.name for path in Path(folder).iterdir()))
    for rank, names in enumerate(traces):
        if dist.get_rank() == 0:
            print(f"rank {rank}: traces written: {len(names)}", *names)


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
