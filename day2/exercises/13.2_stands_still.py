"""Exercise 13.2: a training that stands still since its loss is scaled.

Lesson:  13
Kind:    find the fault, 10 minutes
Symptom: Before, this learned. Since the loss is scaled, as fp16 needs it, it does not
         move, and there is no error. (Here all numbers are fp32, so that any CPU can.)
Run:     python day2/exercises/13.2_stands_still.py
Check:   python scripts/check.py 13.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def step(model, optimizer, scaler, x, y):
    """Take one step, no longer than the learning rate. Return the loss."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def main():
    """Run on every rank: train y = 2 x with a scaled loss, and with one that is not."""
    x = torch.linspace(-1, 1, 16)[:, None]
    for enabled in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        losses = [step(model, optimizer, scaler, x, 2 * x) for _ in range(50)]
        if dist.get_rank() == 0:
            name = "scaled" if enabled else "not scaled"
            print(
                f"{name}: loss {losses[0]:.4f} in step 0, {losses[-1]:.4f} in step 49"
            )


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
