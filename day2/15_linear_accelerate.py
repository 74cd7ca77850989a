"""Lesson 15: the same ideas in a library that hides them, Hugging Face Accelerate.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  Accelerator, prepare, accelerate launch
Run:       scripts/multinode_setup_and_run.sh day2/15_linear_accelerate.py
Look for:  => y = 0.70 x + 0.30, losses within 0e+00 of those without Accelerate
Try next:  accelerate launch day2/15_linear_accelerate.py; Accelerator(mixed_precision="bf16").
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def make_points(count, seed):
    """Return x and y, float32 [N, 1] each: points on the line y = 0.7 x + 0.3, in random order."""
    x = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x, 0.7 * x + 0.3


class Net(nn.Module):
    """Three linear layers: x, float32 [N, 1], to y, float32 [N, 1]."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(1, 1000)
        self.fc2 = nn.Linear(1000, 1000)
        self.fc3 = nn.Linear(1000, 1)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def train(accelerator, x, y, args):
    """Train with Accelerate. Return the model and the loss of each epoch, [epochs]."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, drop_last=True)
    # To the device; the model into DDP; of the batches each rank its own.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(args.epochs):
        total = 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        losses.append(accelerator.reduce(total / len(loader), reduction="mean"))
        accelerator.log({"loss/train": losses[-1].item()}, step=(epoch + 1) * len(loader))
    return accelerator.unwrap_model(model), torch.stack(losses)


def train_by_hand(accelerator, x, y, args):
    """Do the same with what the earlier lessons used. Return the loss of each epoch, [epochs]."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(args.seed)
    model = Net().to(accelerator.device)
    if world_size > 1:
        model = DistributedDataParallel(model)  # averages the gradients during backward
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps, losses = len(x) // (args.batch_size * world_size), []
    for _ in range(args.epochs):
        total = 0
        for step in range(steps):
            begin = (step * world_size + rank) * args.batch_size  # each rank the next batch
            batch = slice(begin, begin + args.batch_size)
            optimizer.zero_grad()
            loss = F.mse_loss(
                model(x[batch].to(accelerator.device)), y[batch].to(accelerator.device)
            )
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(total / steps)
        if world_size > 1:
            dist.all_reduce(losses[-1])
            losses[-1] /= world_size
    return torch.stack(losses)


def main(args):
    """Run on every rank: train with Accelerate, then without. Compare."""
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.accelerator.device_count()
    accelerator = Accelerator(cpu=shared, log_with="tensorboard", project_dir="runs")
    accelerator.init_trackers(Path(__file__).stem)
    say = accelerator.on_main_process(print)  # accelerator.print would say it once a node
    say(f"ranks: {accelerator.num_processes}, device: {accelerator.device.type}")
    x, y = make_points(1000, args.seed)
    model, losses = train(accelerator, x, y, args)
    expected = train_by_hand(accelerator, x, y, args)
    say(f"loss: {losses[0]:.1e} after the first epoch, {losses[-1]:.1e} at the end")
    with torch.inference_mode():
        left, right = model(torch.tensor([[-1.0], [1.0]], device=accelerator.device)).flatten()
    gap = (losses - expected).abs().max()
    line = f"y = {(right - left) / 2:.2f} x + {(right + left) / 2:.2f}"
    say(f"=> {line}, losses within {gap:.0e} of those without Accelerate")
    accelerator.end_training()  # writes out the curve and leaves the process group


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=50, help="times through the data (50)")
    parser.add_argument("--batch-size", type=int, default=125, help="points per process (125)")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (0.001)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and points (0)")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    most = 1000 // int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size > most:
        parser.error(f"batch-size must be at most {most}: there are 1000 points for all ranks")
    return args


if __name__ == "__main__":
    main(parse_args())
