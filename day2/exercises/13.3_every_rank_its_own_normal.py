"""Exercise 13.3: batch normalization on several ranks.

Lesson:  13
Kind:    find the fault, 25 minutes
Symptom: With batch normalization, four ranks do not compute what one process computes
         with the same global batch. (nn.BatchNorm1d does the same.)
Run:     python day2/exercises/13.3_every_rank_its_own_normal.py
Check:   python scripts/check.py 13.3
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


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
            mean, var = moments[0], moments[1] - moments[0] ** 2
            self.running_mean.lerp_(mean.detach(), 0.1)  # remembered for evaluation
            self.running_var.lerp_(var.detach(), 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


def main():
    """Run on every rank: normalise a part of a batch. The parts differ."""
    rank = dist.get_rank()
    layer = BatchNorm(1)
    batch = torch.arange(16.0)[:, None].split(4)[rank]
    rows = gather((layer(batch).flatten().tolist(), layer.running_mean.item()))
    if rank == 0:
        expected = (
            nn.BatchNorm1d(1, affine=False)(torch.arange(16.0)[:, None])
            .flatten()
            .split(4)
        )
        for r, (output, mean) in enumerate(rows):
            wanted = ", ".join(f"{x:.2f}" for x in expected[r])
            got = ", ".join(f"{x:.2f}" for x in output)
            print(f"rank {r}: {got}; one process: {wanted}; running mean {mean:.3f}")


class SumOverRanks(torch.autograd.Function):
    """The sum over all ranks. all_reduce alone would bring no gradients back."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
