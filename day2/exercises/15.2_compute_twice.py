"""Exercise 15.2: memory for computing: activation checkpointing.

Lesson:  15
Kind:    fill in, 15 minutes
Task:    What the forward pass keeps for backward often takes more memory than the
         model. Have forward() keep only what goes into each layer. backward then
         computes the rest again.
Run:     python day2/exercises/15.2_compute_twice.py
Check:   python scripts/check.py 15.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401, here for you to use


class Net(nn.Module):
    """Eight layers: float32 [N, 32] to float32 [N, 32]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(8)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)  # TODO: by way of checkpoint
        return x


def main():
    """Run on every rank: count what is kept."""
    model = Net()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    many = kept(model, torch.randn(256, 32))
    print(f"the model: {numbers:,} numbers; kept: {many:,}")


def kept(model, x):
    """Return how many numbers forward keeps for backward, besides the model's."""
    storages = {}

    def keep(tensor):
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    y.square().mean().backward()
    return sum(storages.values())


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options.append(__file__)
        torchrun(options)
