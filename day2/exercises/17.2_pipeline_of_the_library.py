"""Exercise 17.2: the same with PyTorch's own `PipelineStage` and `Schedule1F1B`.

Lesson:  17
Kind:    fill in, 15 minutes
Task:    Train this model in a pipeline of four stages: torch.distributed.pipelining's
         Schedule1F1B, with 8 micro-batches, without any send or recv of your own. On
         CPUs it takes torch 2.8 or newer.
Run:     python day2/exercises/17.2_pipeline_of_the_library.py
Check:   python scripts/check.py 17.2
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401, for you
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: F401, for you


def build_stage(rank):
    """Return a quarter of the model: float32 [N, 16] to float32 [N, 16]."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def train(stage, x, y, steps):
    """Train this rank's stage, always on the same x and y: float32 [64, 16].

    Return the losses of the steps on the last rank, and an empty list on the others.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    # TODO: PipelineStage(stage, rank, world size, torch.device("cpu")); of it make a
    # Schedule1F1B with n_microbatches=8 and loss_fn=F.mse_loss
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        # TODO: one call of schedule.step. The first rank gives x. The last one gives
        # target=y and losses=parts, a list: it is filled with a loss a micro-batch.
        optimizer.step()
    return losses


def main():
    """Run on every rank: train, and show the first loss and the last."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    losses = train(build_stage(dist.get_rank()), x, x.flip(1).sin(), 50)
    if dist.get_rank() == dist.get_world_size() - 1:
        text = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "no losses"
        print(f"the last stage: {text}")


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
