"""Solution 4.5: lesson 4, typed by you, in three places.

Lesson:  4
Kind:    fill in, 25 minutes
Task:    Four ranks run lesson 3's training, all with the same images. Make it data
         parallel in three places: TODO 1 and 2 in train(), TODO 3 in
         average_gradients() and in train_one_epoch(), which has to call it. The last
         line that it prints is lesson 4's. It compares only the first ten steps, and no
         parameter is frozen here, so it can say ok too early: run the check, too.
Run:     python day1/exercises/solutions/4.5_type_data_parallelism.py
Check:   python scripts/check.py 4.5 --solution
"""

import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST

MAX_STEPS = 40  # of each epoch. None, all: lesson 4's losses but for the last digit


def average_gradients(model):
    """Replace each gradient by its mean over the ranks. Every rank must call this."""
    if not hasattr(model, "all_ranks"):  # only once: every message costs time
        trained = [x.requires_grad for x in model.parameters()]  # False: frozen
        model.all_ranks = gather(trained)
        assert all(x == trained for x in model.all_ranks), "ranks froze other layers"
    for parameter in model.parameters():
        if parameter.requires_grad:  # not frozen
            dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
            parameter.grad /= dist.get_world_size()  # the mean, not the sum


def train_one_epoch(model, loader, optimizer):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        # Now .grad is this rank's, and the optimizer has not used it yet.
        average_gradients(model)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def train(train_set, batch_size, epochs=2):
    """Train a new model on all ranks. Return it and the losses of all steps."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        batches = islice(loader, MAX_STEPS)
        epoch_losses = train_one_epoch(model, batches, optimizer)
        dist.all_reduce(epoch_losses)  # the sum over the ranks, in place
        losses.append(epoch_losses / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1].mean():.4f}")
    return model, torch.cat(losses)


def main():
    """Run on every rank: train, then compare the ranks, and rank 0 with one process."""
    train_set = load_mnist()
    model, losses = train(train_set, batch_size=64)
    numbers = nn.utils.parameters_to_vector(model.parameters()).tolist()
    same = all(others == numbers for others in gather(numbers))
    if dist.get_rank() == 0:
        gap = gap_to_one_process(losses, train_set, 64 * dist.get_world_size())
        parameters = f"parameters {'identical' if same else 'DIFFERENT'} on all ranks"
        gaps = f"losses within {gap:.0e} of one process (limit 1e-05)"
        verdict = "ok" if same and gap <= 1e-5 else "WRONG"
        print(f"=> {parameters}, {gaps}: {verdict}")


def gap_to_one_process(losses, train_set, batch_size):
    """Train 10 steps on rank 0 alone. Return the largest difference of the losses."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    # DistributedSampler makes the same list, and all ranks together take its next part.
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(train_set), generator=generator)
    gaps = []
    for loss, indices in zip(losses[:10], order.split(batch_size)):
        images, labels = [x.index_select(0, indices) for x in train_set.tensors]
        optimizer.zero_grad()
        expected = F.cross_entropy(model(images), labels)
        expected.backward()
        optimizer.step()
        gaps.append(abs(loss - expected).item())
    return max(gaps)


def load_mnist():
    """Return the training set: images, uint8 [60000, 28, 28], and labels."""
    folders = [folder / "data" for folder in Path(__file__).parents]
    part = MNIST(next(x for x in folders if x.is_dir()), train=True)
    return TensorDataset(part.data, part.targets)


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


# ---- Shared helpers, identical in every exercise


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
