"""Exercise 15.7: sharding inside a node, copies between nodes (HSDP).

Lesson:  15
Kind:    fill in, 10 minutes
Task:    The network between two nodes is slow, so no layer should cross it. Divide
         the model among the ranks of a node only, so that each node has all of it. Two
         nodes with two ranks each: node 0 has ranks 0 and 1.
Run:     python day2/exercises/15.7_inside_a_node.py
Check:   python scripts/check.py 15.7
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS_OF_A_NODE = 2


def shard(model):
    """Divide a model among the ranks of a node. Each node has a copy."""
    # TODO: a different mesh. make_mesh, below, makes one with two dimensions.
    mesh = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu")  # all ranks in a row
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return model


def train(steps):
    """Train a new sharded model. Return it, and each step's loss over all ranks."""
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.linspace(-2, 2, 32)[rank::ranks, None]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.cat([x.sin(), x.cos()], dim=1))
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return model, losses


def main():
    """Run on every rank: train, and say what each rank holds."""
    model, losses = train(50)
    parts = [parameter.to_local() for parameter in model.parameters()]
    numbers = sum(part.numel() for part in parts)
    first = parts[0].flatten()[0].item()
    print(f"rank {dist.get_rank()}: {numbers} numbers, the first is {first:.4f}")
    if dist.get_rank() == 0:
        print(f"step 0: loss {losses[0]:.4f}, step 49: loss {losses[-1]:.4f}")


# ---- Shared helpers, identical in every exercise


def make_mesh(ranks, names, kind, timeout):
    """Return a mesh of these ranks, int64 [rows, columns]. Every rank must call this.

    The groups of init_device_mesh would wait for 10 minutes with NCCL, 30 with gloo.
    """
    columns, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    rows, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    groups = [columns, rows]
    return dist.DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)


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
