"""Solution 5.1: the profiler leaves no trace.

Lesson:  5
Kind:    find the fault
Symptom: The training runs, the profiler is on, there is no error. But the folder for the
         traces stays empty.
Run:     python day1/exercises/solutions/5.1_no_trace.py
Check:   python scripts/check.py 5.1 --solution
"""

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule, tensorboard_trace_handler

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides what the profiler says of itself


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def record(folder):
    """Train five steps. Write a trace of the last three into folder, one file a rank."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = schedule(wait=0, warmup=2, active=3, repeat=1)
    writer = tensorboard_trace_handler(str(folder), worker_name=f"rank{dist.get_rank()}")
    with profile(schedule=plan, on_trace_ready=writer, acc_events=True) as profiler:
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(32, 64)), torch.zeros(32, 64)).backward()
            optimizer.step()
            profiler.step()  # one step ends here: the plan counts these calls


def main():
    """Run on every rank: record, and let rank 0 show which traces there are."""
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        traces = gather(sorted(path.name for path in Path(folder).iterdir()))
    for rank, names in enumerate(traces):
        if dist.get_rank() == 0:
            print(f"rank {rank}: traces written: {len(names)}", *names)


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
