"""Solution 8.3: three faults: four ranks, and exactly the curve of one.

Lesson:  8
Kind:    capstone, 30 minutes
Symptom: The losses of four ranks equal those of one process, to the last digit. This
         looks like success, but four ranks take as many steps as one, and nothing is
         gained. Three faults are in this program. Each makes another harder to see:
         if you fix one, the numbers may look worse than before. What the functions'
         docstrings say is right.
Run:     python day1/exercises/solutions/8.3_capstone_too_good.py
Check:   python scripts/check.py 8.3 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LR = 0.05  # for one process
BATCH_SIZE = 16  # per process
EPOCHS = 2


def train_one_epoch(model, loader, optimizer, world_size):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        # Not divided: DistributedDataParallel already takes the mean over the ranks.
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def over_all_ranks(losses, world_size):
    """Return the mean loss of each global batch. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)
    # The sum was right only as long as each loss was divided by world_size before.
    return losses / world_size


def train(points, rank, world_size):
    """Train a new model on world_size ranks. Return it and the losses of all steps."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = make_model()
    ddp_model = model
    if world_size > 1:
        ddp_model = DistributedDataParallel(model)  # averages gradients in backward
    lr = LR * world_size  # the linear scaling rule
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    # All ranks shuffle in the same way, then each takes every world_size-th point.
    sampler = DistributedSampler(points, world_size, rank, seed=0)
    # A sampler that the loader does not get divides nothing.
    loader = DataLoader(points, batch_size=BATCH_SIZE, sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        steps = train_one_epoch(ddp_model, loader, optimizer, world_size)
        losses.append(over_all_ranks(steps, world_size))
    return model, torch.cat(losses)


def main():
    """Run on every rank: train together, then rank 0 alone. Compare the losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    points = make_points()
    _, together = train(points, rank, world_size)
    if rank == 0:
        _, alone = train(points, 0, 1)
        for name, losses in (("alone", alone), ("together", together)):
            parts = [part.mean().item() for part in losses.chunk(4)]
            curve = ", ".join(f"{loss:.4f}" for loss in parts)
            print(f"{name}: {len(losses)} steps, mean loss of each quarter {curve}")


def make_model():
    """Return a new model: float32 [N, 8] to [N, 1]."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def make_points():
    """Return 1,024 points: x float32 [1024, 8] and y [1024, 1]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=generator)
    y = x[:, :3].sum(dim=1, keepdim=True).tanh()
    return TensorDataset(x, y)


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
