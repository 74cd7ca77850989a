"""Exercise 17.2: compute twice, keep little.

Lesson:  17
Kind:    fill in
Task:    What the forward pass keeps for backward often takes more memory than the model. Have
         forward() keep only what goes into each layer. backward then computes the rest again.
Run:     python day2/exercises/17.2_compute_twice.py
Check:   python scripts/check.py 17.2
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401, here for you to use


class Net(nn.Module):
    """Eight layers: float32 [N, 32] to float32 [N, 32]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)  # TODO: by way of checkpoint
        return x


def kept(model, x):
    """Return how many numbers a forward pass keeps for backward, those of the model apart."""
    storages = {}

    def keep(tensor):
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    y.square().mean().backward()
    return sum(storages.values())


def main():
    """Run on every rank: count what is kept."""
    model = Net()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    print(f"the model: {numbers:,} numbers; kept: {kept(model, torch.randn(256, 32)):,}")


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
    launch(1)
