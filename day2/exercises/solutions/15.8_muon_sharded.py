"""Solution 15.8: Muon's steps of a sharded model aren't those of one process.

Lesson:  15
Kind:    find the fault, 15 minutes
Symptom: The loss falls, and there is no error. But already in the first step, the
         weights move elsewhere than in one process. With Adam they don't.
Run:     python day2/exercises/solutions/15.8_muon_sharded.py
Check:   python scripts/check.py 15.8 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Muon(torch.optim.Optimizer):
    """Adds the momentum, made orthogonal: small directions of a matrix count, too."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for x in group["params"]:
                momentum = self.state[x].setdefault("sum", torch.zeros_like(x.grad))
                momentum.mul_(0.9).add_(x.grad)
                # Each rank changes its rows of the weight. But only a whole matrix can
                # be made orthogonal: all ranks gather it, and compute the same.
                whole = orthogonal(momentum.full_tensor())
                mesh = x.device_mesh
                rows = whole.chunk(mesh.size())[mesh.get_local_rank()]
                x.to_local().sub_(rows, alpha=group["lr"])


def train(steps, group):
    """Train a model that the ranks of a group share. Return it and each step's loss."""
    model = make_model()
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    optimizer = Muon(model.parameters(), {"lr": LR})
    x = make_data()[mesh.get_local_rank() :: mesh.size()]  # what this rank learns from
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item())
    return model, losses


def step_off(mine, right, start):
    """Return how far off a step of a sharded model is, {parameter: 0.5 for 50%}.

    mine: the model after it, on all ranks. right: the same on a mesh of one rank, with
    the global batch. start: before the step. Every rank must call this.
    """
    off = {}
    models = mine.named_parameters(), right.parameters(), start.parameters()
    for (name, x), y, z in zip(*models):
        x, y, z = x.full_tensor(), y.full_tensor(), z.full_tensor()
        off[name] = ((x - y).norm() / (y - z).norm()).item()
    return off


def main():
    """Run on every rank: compare one step with that of one process, then train."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    timeout = timedelta(seconds=20)
    alone = [dist.new_group([r], timeout=timeout) for r in range(ranks)][rank]
    _, losses = train(20, dist.group.WORLD)
    steps = [(1, dist.group.WORLD), (1, alone), (0, alone)]
    off = step_off(*[train(count, group)[0] for count, group in steps])
    if rank == 0:
        print(f"step 0: loss {losses[0]:.4f}, step 19: loss {losses[-1]:.4f}")
        for name, share in off.items():
            print(f"{name}: the first step is {share:.1%} off")


# ---- Shared helpers, identical in every exercise

LR = 0.02


def make_model():
    """Return two matrices, float32 [256, 64] and [64, 256], the same on all ranks."""
    torch.manual_seed(0)
    up, down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
    return nn.Sequential(up, nn.Tanh(), down)


def make_data():
    """Return float32 [480, 64]."""
    return torch.randn(480, 64, generator=torch.Generator().manual_seed(0))


def loss_of(model, x):
    """Return how far the model is from moving each number to the next place."""
    return (model(x) - x.roll(1, dims=1)).square().mean()


def orthogonal(matrix):
    """Return the nearest matrix whose singular values are about 1: Newton-Schulz."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        y = x @ x.T
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x  # by Keller Jordan
    return x.T if tall else x


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
