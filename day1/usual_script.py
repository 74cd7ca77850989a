"""Train a small network to read digits, on one device: a usual script.

Run: python day1/usual_script.py --epochs 3

Nothing in it is distributed. OWN_SCRIPT.md, beside it, changes that step by step.
"""

import argparse
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):
    """Two convolutions: float32 [N, 1, 28, 28] to logits, float32 [N, 10]."""

    def __init__(self, norm, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.norm1 = nn.BatchNorm2d(16) if norm == "batch" else nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.norm2 = nn.BatchNorm2d(32) if norm == "batch" else nn.GroupNorm(4, 32)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x))).flatten(1)
        return self.fc(self.dropout(x))


def train_one_epoch(model, loader, optimizer, device, args):
    """Train on each batch once. Return the mean loss."""
    model.train()
    losses = []
    for images, labels in islice(loader, args.max_steps):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the mean loss and the share of right answers."""
    model.eval()
    loss, correct = 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        scores = model(images)
        loss += F.cross_entropy(scores, labels, reduction="sum").item()
        correct += (scores.argmax(dim=1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", default="data", help="folder of MNIST (data)")
    add("--epochs", type=int, default=5, help="epochs (5)")
    add("--batch-size", type=int, default=64, help="training batch size (64)")
    add("--test-batch-size", type=int, default=1000, help="test batch size (1000)")
    add("--lr", type=float, default=0.05, help="learning rate (0.05)")
    add("--gamma", type=float, default=0.7, help="factor of the rate per epoch (0.7)")
    add("--norm", choices=["batch", "group"], default="batch", help="norm (batch)")
    add("--dropout", type=float, default=0.25, help="share of dropped numbers (0.25)")
    add("--no-augment", action="store_true", help="no random shifts and turns")
    add("--workers", type=int, default=2, help="processes that load data (2)")
    add("--seed", type=int, default=0, help="for weights, order, dropout (0)")
    add("--max-steps", type=int, help="end each epoch after so many batches")
    add("--save", default="model.pt", help="file for the trained model (model.pt)")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A worker that cannot send a batch lives on: wait for it for a minute only.
    workers = {"num_workers": args.workers, "timeout": 60 if args.workers else 0}
    steps = [transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)]
    test_transform = transforms.Compose(steps)
    if not args.no_augment:
        steps = [transforms.RandomAffine(10, translate=(0.1, 0.1)), *steps]
    train_transform = transforms.Compose(steps)
    train_set = datasets.MNIST(args.data, transform=train_transform, download=True)
    test_set = datasets.MNIST(args.data, train=False, transform=test_transform)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, **workers)
    test_loader = DataLoader(test_set, args.test_batch_size, **workers)
    model = Net(args.norm, args.dropout).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, optimizer, device, args)
        test_loss, accuracy = evaluate(model, test_loader, device)
        scheduler.step()
        tested = f"test {test_loss:.4f}, {accuracy:.2%}"
        print(f"epoch {epoch}: loss {loss:.4f}, {tested}")
    torch.save(model.state_dict(), args.save)
    print(f"saved: {args.save}")


if __name__ == "__main__":
    main()
