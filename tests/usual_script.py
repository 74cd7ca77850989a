"""Train a small network on one device: a usual script, as many people have one.

The boxes "In your own script" of the lessons' pages are changes to this file. tests/test_docs.py
applies each of them and runs what comes out on two ranks.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    """Your data: here 4,096 points of the plane in two classes."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(4096, 2, generator=generator)
        self.labels = (self.points.prod(dim=1) > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_set = Points()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    for epoch in range(3):
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
