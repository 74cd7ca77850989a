"""Solution 16.2: accumulated, and sent all the same.

Lesson:  16
Kind:    find the fault
Symptom: The gradients of four batches are accumulated, and the training is right. But there are
         as many messages as without accumulation.
Run:     python day2/exercises/solutions/16.2_no_less_is_sent.py
Check:   python scripts/check.py 16.2 --solution
"""

import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
        # DDP decides in forward whether backward will send: forward must be inside as well.
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
