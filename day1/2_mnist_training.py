"""Lesson 2: train on MNIST with a single device.

Builds on: 1_torch_dist_gpu.py
New here:  the data, the model and the training loop of all later lessons
Run:       python day1/2_mnist_training.py
Look for:  => ...% of 10,000 test images right (limit 90%), mean loss ...: ok
Try next:  --epochs 5; --batch-size 256, and then with --lr 0.06 too.
"""

import argparse
import os
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision.datasets import MNIST


def train_one_epoch(model, loader, optimizer, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(train_set, device, args):
    """Train a new model. Return it and the losses of all steps."""
    torch.manual_seed(args.seed)  # the same first weights in every run
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    losses = []
    for epoch in range(args.epochs):
        sampler.generator.manual_seed(args.seed + epoch)  # a new order in every epoch
        begin = time.perf_counter()
        batches = islice(loader, args.max_steps)  # None: all
        losses.append(train_one_epoch(model, batches, optimizer, device))
        images_seen = min(len(losses[-1]) * args.batch_size, len(train_set))
        loss = losses[-1].mean().item()  # waits for the device: only now read the clock
        speed = images_seen / (time.perf_counter() - begin)
        print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")
    return model, torch.cat(losses)


def main(device, args):
    """Train, evaluate, report."""
    make_repeatable()  # only because we compare runs
    train_set, test_set = load_mnist()
    model, losses = train(train_set, device, args)
    accuracy = evaluate(model, test_set, device)
    write_scalars(losses, args.batch_size)
    # Guessing gets 10% right, ten steps about 25%.
    limit = 0.2 if args.max_steps else 0.9
    right = f"{accuracy:.2%} of {len(test_set):,} test images right (limit {limit:.0%})"
    return prove(f"{right}, mean loss {losses.mean():.4f}", accuracy >= limit)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the share of the test images that the model gets right, from 0 to 1."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    correct = 0
    for images, labels in DataLoader(test_set, batch_size=1000):
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(test_set)


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(FOLDER, purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


def load_mnist():
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    train_set = MNIST(DATA, train=True)
    test_set = MNIST(DATA, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


class Net(nn.Module):
    """A small convolutional network: uint8 [N, 28, 28] to logits, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = images.unsqueeze(1) / 255  # float32 [N, 1, 28, 28], from 0 to 1
        x = (x - 0.1307) / 0.3081  # mean 0, standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def choose_device(local_rank, local_world_size):
    """Return this rank's device, and the backend that connects such devices."""
    torch.set_num_threads(1)  # more would spin while they wait: slow on busy cores
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    # Where each rank sees its own GPU only, the launcher says how many the node has.
    shared = local_world_size > int(os.environ.get("GPUS_ON_NODE", gpus))
    if kind in ("cpu", "mps") or (kind == "xpu" and shared):
        return torch.device("cpu"), "gloo"  # gloo cannot use Apple's mps, Intel's xpu
    device = torch.device(kind, local_rank % gpus)
    torch.accelerator.set_device_index(device.index)
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def make_repeatable():
    """Have a GPU compute the same numbers in each run. Slow: only to compare runs."""
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # TF32 rounds float32's 24 bits to 11


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=2, help="epochs (2)")
    add("--batch-size", type=int, default=64, help="per process (64)")
    add("--lr", type=float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, help="end each epoch after so many steps")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    return args


if __name__ == "__main__":
    device, _ = choose_device(local_rank=0, local_world_size=1)
    sys.exit(main(device, parse_args()))
