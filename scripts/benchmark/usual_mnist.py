"""Train on MNIST the way many tutorials do: what benchmark.py compares lesson 2 with.

Usage: scripts/usual_mnist.py FOLDER      FOLDER holds MNIST/raw/ with the files unpacked

Images are read, turned into floats and normalised one by one. The model has 1.2 million parameters,
lesson 2's 47 thousand. It ends after the first epoch with 98% of the test images right.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

ENOUGH = 0.98


def make_loader(folder, train, batch_size, workers=0):
    """Return a DataLoader of images, float32 [N, 1, 28, 28], and labels, int64 [N]."""
    normalise = transforms.Normalize((0.1307,), (0.3081,))
    change = transforms.Compose([transforms.ToTensor(), normalise])
    data = datasets.MNIST(folder, train=train, transform=change)
    return DataLoader(data, batch_size, shuffle=train, num_workers=workers)


class Net(nn.Module):
    """A convolutional network: images, float32 [N, 1, 28, 28], to log-probabilities [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, device, loader, optimizer, max_steps):
    """Train for an epoch; say how it goes."""
    model.train()
    for step, (images, labels) in enumerate(itertools.islice(loader, max_steps)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


def test(model, device, loader, max_steps):
    """Return the share of images that the model gets right, from 0 to 1."""
    model.eval()
    right = count = 0
    with torch.no_grad():
        for images, labels in itertools.islice(loader, max_steps):
            scores = model(images.to(device))
            right += (scores.argmax(1) == labels.to(device)).sum().item()
            count += len(labels)
    return right / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=14, help="at most (14)")
    parser.add_argument("--max-steps", type=int, help="end an epoch and a test after so many")
    args = parser.parse_args()
    torch.manual_seed(1)
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    train_loader = make_loader(args.folder, train=True, batch_size=64)
    test_loader = make_loader(args.folder, train=False, batch_size=1000)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        train(model, device, train_loader, optimizer, args.max_steps)
        accuracy = test(model, device, test_loader, args.max_steps)
        scheduler.step()
        print(f"=> epoch {epoch}: {accuracy:.2%} of the test images right", flush=True)
        if accuracy >= ENOUGH:
            break


if __name__ == "__main__":
    main()
