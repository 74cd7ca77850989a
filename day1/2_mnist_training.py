"""Lesson 2: train on MNIST with a single device.

Builds on: 1_torch_dist_gpu.py
New here:  the data, the model and the training loop of all later lessons
Run:       python day1/2_mnist_training.py
Look for:  => 98.27% of 10,000 test images right, mean loss 0.1552
Try next:  --epochs 5; --batch-size 256, and then with --lr 0.06 too.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import RandomSampler
from tqdm import tqdm


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not accelerator or accelerator.type == "mps":  # Apple's has no collectives
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    shared = local_world_size > count  # then through gloo: NCCL refuses two ranks on one GPU
    return device, "gloo" if shared else dist.get_default_backend_for_device(device)


def load_mnist(data_dir):
    """Return images, uint8 [N, 28, 28], and labels, int64 [N]: of training, then of testing."""
    from torchvision.datasets import MNIST, utils  # here, because the ranks need not wait for it

    # Unpacked for this process alone: whoever shares the files may read one half written.
    with tempfile.TemporaryDirectory() as folder:
        (raw := Path(folder, "MNIST", "raw")).mkdir(parents=True)
        for name, md5 in MNIST.resources:
            if not utils.check_integrity(archive := data_dir / "MNIST" / "raw" / name, md5):
                sys.exit(f"{archive} is missing or damaged. Restore it: git checkout data/MNIST")
            utils.extract_archive(archive, raw)
        parts = MNIST(folder, train=True), MNIST(folder, train=False)
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def batches(images, labels, sampler, batch_size, max_steps):
    """Yield images and labels batch by batch, in the sampler's order."""
    order = torch.tensor(list(sampler), device=images.device)
    hidden = os.environ.get("RANK", "0") != "0" or None  # None: shown on a terminal only
    for indices in tqdm(order.split(batch_size)[:max_steps], disable=hidden, leave=False):
        yield images.index_select(0, indices), labels.index_select(0, indices)


class Net(nn.Module):
    """A small convolutional network: images, uint8 [N, 28, 28], to scores, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = (images[:, None] / 255 - 0.1307) / 0.3081  # to mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def train_one_epoch(model, optimizer, batches):
    """Train on each batch once. Return [2, steps]: loss summed over the batch; batch size."""
    history = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        # No .item() here: the CPU would wait for the GPU in every step.
        history.append(torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))]))
    return torch.stack(history, dim=1)


@torch.inference_mode()
def evaluate(model, images, labels):
    """Return the share of images that the model gets right, from 0 to 1."""
    right = [model(x).argmax(1) for x in images.split(1000)]
    return (torch.cat(right) == labels).float().mean().item()


def write_scalars(history):
    """Write the loss over the images seen to runs/, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, (loss, size) in zip(history[1].cumsum(0).int().tolist(), history.T.tolist()):
            writer.add_scalar("loss/train", loss / size, step)


def train(images, labels, args):
    """Train a new model. Return it and the history of all steps."""
    torch.manual_seed(args.seed)  # the same first weights in every run
    model = Net().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = RandomSampler(images, generator=torch.Generator())
    histories = []
    for epoch in range(args.epochs):
        sampler.generator.manual_seed(args.seed + epoch)  # a new order, the same in every run
        begin = time.perf_counter()
        steps = batches(images, labels, sampler, args.batch_size, args.max_steps)
        histories.append(train_one_epoch(model, optimizer, steps))
        # Reading the sums waits for the device. Only then is it fair to read the clock.
        loss, count = histories[-1].sum(1).tolist()
        speed = count / (time.perf_counter() - begin)
        print(f"epoch {epoch}: loss {loss / count:.4f}, {speed:,.0f} images/s")
    return model, torch.cat(histories, dim=1)


def main(device, data, args):
    """Train, evaluate, report."""
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in data)
    model, history = train(images, labels, args)
    accuracy = evaluate(model, test_images, test_labels)
    write_scalars(history)
    loss = history[0].sum() / history[1].sum()
    print(f"=> {accuracy:.2%} of {len(test_labels):,} test images right, mean loss {loss:.4f}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="times through the data (2)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process (64)")
    parser.add_argument("--lr", type=float, default=0.015, help="learning rate (0.015)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, help="end an epoch after this many steps")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


if __name__ == "__main__":
    args = parse_args()
    device, _ = choose_device(local_rank=0, local_world_size=1)
    main(device, load_mnist(args.data_dir), args)
