"""Solution 14.2: accumulated gradients that are sent each time.

Lesson:  14
Kind:    find the fault, 10 minutes
Symptom: The gradients of four batches are accumulated, and the training is right. But
         there are as many messages as without accumulation.
Run:     python day2/exercises/solutions/14.2_no_less_is_sent.py
Check:   python scripts/check.py 14.2 --solution
"""

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size, accumulate):
    """Train on 16 batches. Return the parameters and the number of messages."""
    torch.manual_seed(0)
    model, messages = DistributedDataParallel(torch.nn.Linear(1, 1)), []

    def counting(state, bucket):
        messages.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = torch.linspace(-2, 2, 64 * world_size)[rank::world_size, None]
    for step, x in enumerate(points.split(4), 1):
        last = step % accumulate == 0
        # DDP decides in forward whether backward will send: forward must be inside too.
        with contextlib.nullcontext() if last else model.no_sync():
            (F.mse_loss(model(x), 3 * x - 1) / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.item() for parameter in model.parameters()], len(messages)


def main():
    """Run on every rank: accumulate nothing, then four batches."""
    for accumulate in (1, 4):
        _, messages = train(dist.get_rank(), dist.get_world_size(), accumulate)
        if dist.get_rank() == 0:
            print(f"batches for one optimizer step: {accumulate}, messages: {messages}")


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
