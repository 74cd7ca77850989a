"""Solution 6.5: every rank has its own idea of normal.

Lesson:  6
Kind:    find the fault
Symptom: With batch normalisation, four ranks do not compute what one process computes with
         the same global batch: each rank has other means. (nn.BatchNorm1d does the same.)
Run:     python day1/exercises/solutions/6.5_every_rank_its_own_normal.py
Check:   python scripts/check.py 6.5 --solution
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks. dist.all_reduce alone would not bring gradients back."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


class BatchNorm(nn.Module):
    """Brings every column of a batch, float32 [N, size], to mean 0 and variance 1."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            moments = torch.stack([x.mean(0), x.square().mean(0)])
            # Over all ranks. On GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model) does it.
            moments = SumOverRanks.apply(moments) / dist.get_world_size()
            mean, var = moments[0], moments[1] - moments[0] ** 2
            self.running_mean.lerp_(mean.detach(), 0.1)  # remembered for evaluation
            self.running_var.lerp_(var.detach(), 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


def main():
    """Run on every rank: normalise a part of a batch. The parts are not alike."""
    rank = dist.get_rank()
    layer = BatchNorm(1)
    batch = torch.arange(16.0)[:, None].split(4)[rank]
    rows = gather((layer(batch).flatten().tolist(), layer.running_mean.item()))
    if rank == 0:
        expected = nn.BatchNorm1d(1, affine=False)(torch.arange(16.0)[:, None]).flatten().split(4)
        for r, (output, mean) in enumerate(rows):
            wanted = ", ".join(f"{x:.2f}" for x in expected[r])
            got = ", ".join(f"{x:.2f}" for x in output)
            print(f"rank {r}: {got}; one process: {wanted}; running mean {mean:.3f}")


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
    launch(4)
