"""Exercise 11.2: a training that hangs at the end.

Lesson:  11
Kind:    find the fault, 15 minutes
Symptom: With 2 ranks it ends. With 4 it hangs at the end of the epoch, until an error
         comes after a timeout of 2 s.
         The check wants no chunk twice, and the same number of steps on all ranks.
Run:     python day2/exercises/11.2_stuck_at_the_end.py
Check:   python scripts/check.py 11.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHUNKS, CHUNK_SIZE = 10, 16  # in the file that is simulated here


def batches(chunks, rank, world_size):
    """Yield the batches of this rank, one per chunk, dealt out like cards."""
    generator = torch.Generator().manual_seed(0)
    for chunk in torch.randperm(chunks, generator=generator)[rank::world_size].tolist():
        yield torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE)


def train(chunks, rank, world_size):
    """Train a new model for one epoch. Return the number of steps."""
    group = dist.new_group(timeout=timedelta(seconds=2))  # not half an hour
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    for numbers in batches(chunks, rank, world_size):
        x = numbers[:, None] / (chunks * CHUNK_SIZE)
        optimizer.zero_grad()
        F.mse_loss(model(x), x.sin()).backward()
        optimizer.step()
        steps += 1
    return steps


def main():
    """Run on every rank: train for one epoch."""
    rank = dist.get_rank()
    steps = train(CHUNKS, rank, dist.get_world_size())
    print(f"rank {rank}: at the end after {steps} steps", flush=True)


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
