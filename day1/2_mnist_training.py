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
from tqdm import tqdm


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
        batches = progress(loader, args.max_steps)
        losses.append(train_one_epoch(model, batches, optimizer, device))
        images_seen = min(len(losses[-1]) * args.batch_size, len(train_set))
        report_epoch(epoch, losses[-1], images_seen, begin)
    return model, torch.cat(losses)


def main(device, args):
    """Train, evaluate, report."""
    train_set, test_set = load_mnist(args.data_dir)
    model, losses = train(train_set, device, args)
    accuracy = evaluate(model, test_set, device)
    write_scalars(losses, args.batch_size)
    # Guessing gets 10% right, and a few steps teach little more.
    limit = min(0.2, args.max_steps / 100) if args.max_steps else 0.9
    right = f"{accuracy:.2%} of {len(test_set):,} test images right (limit {limit:.0%})"
    return prove(f"{right}, mean loss {losses.mean():.4f}", accuracy >= limit)


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def report_epoch(epoch, losses, images, begin):
    """Print the mean loss of an epoch's steps, and images/s, on rank 0."""
    loss = losses.mean().item()  # waits for the device: only now may we read the clock
    speed = images / (time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")


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

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


def load_mnist(data_dir):
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    from torchvision.datasets import MNIST  # here, because importing it takes a second

    train_set, test_set = MNIST(data_dir, train=True), MNIST(data_dir, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


def progress(loader, max_steps=None):
    """Return the loader's first batches, with a bar if rank 0 writes to a terminal."""
    steps = min(len(loader), max_steps or len(loader))
    hidden = None if os.environ.get("RANK", "0") == "0" else True
    # disable=None hides the bar where there is no terminal.
    return tqdm(islice(loader, steps), total=steps, disable=hidden, leave=False)


class Net(nn.Module):
    """A small convolutional network: uint8 [N, 28, 28] to scores, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = images.unsqueeze(1) / 255  # float32 [N, 1, 28, 28], from 0 to 1
        x = (x - 0.1307) / 0.3081  # mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind in ("cpu", "mps"):  # there are no collectives for Apple's GPU
        return torch.device("cpu"), "gloo"
    device = torch.device(kind, local_rank % count)
    # Where Slurm shows a rank only its own GPU, the launcher says how many there are.
    # Parts of a GPU (MIG) do not count: NCCL takes two of them for the same GPU.
    if count == 1 and "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        count = int(os.environ.get("GPUS_ON_NODE", 1))
    shared = local_world_size > count
    if kind == "xpu" and (shared or not dist.is_xccl_available()):
        return torch.device("cpu"), "gloo"  # gloo cannot carry tensors of Intel's GPUs
    torch.accelerator.set_device_index(device.index)
    # We compare runs: a run must give the same numbers again, with little rounding
    # (TF32 keeps 11 of float32's 24 bits). A real job may leave out these lines.
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    torch.backends.cuda.matmul.allow_tf32 = False  # True in NVIDIA's containers
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and newer
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def positive_int(text):
    """Return an argument as a whole number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        problem = f"must be a whole number greater than 0, not {text}"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def positive_float(text):
    """Return an argument as a number greater than 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return number


def mnist_folder(text):
    """Return an argument as a path, if MNIST is there, in files of the right size."""
    sizes = {"train-images-idx3": 47_040_016, "train-labels-idx1": 60_008}
    sizes |= {"t10k-images-idx3": 7_840_016, "t10k-labels-idx1": 10_008}
    for name, size in sizes.items():
        file = Path(text, "MNIST", "raw", f"{name}-ubyte")
        if not file.exists() or file.stat().st_size != size:
            todo = "Restore it: git checkout data/MNIST"
            raise argparse.ArgumentTypeError(f"{file} is missing or damaged. {todo}")
    return Path(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=positive_int, default=2, help="epochs (2)")
    add("--batch-size", type=positive_int, default=64, help="per process (64)")
    add("--lr", type=positive_float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, help="end each epoch after so many steps")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    device, _ = choose_device(local_rank=0, local_world_size=1)
    sys.exit(main(device, args))
