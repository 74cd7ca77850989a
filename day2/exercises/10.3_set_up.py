"""Exercise 10.3: lesson 10's set-up, typed by you: variables, device, group, saving.

Lesson:  10
Kind:    fill in, 30 minutes
Task:    Lesson 6's training, for any number of nodes: the launcher sets five
         variables. As given nobody reads them, so each process is rank 0 of its own
         job, and all of them save. Complete start() (TODO 1 and 3), pick_device()
         (TODO 2) and save() (TODO 4). Run the check, too: without GPUs, this program
         says ok too early. Done early? Start two ranks without a launcher, the first
         one with & at its end, with the five variables before python and this file.
Run:     scripts/multinode_setup_and_run.sh --local 2x2 day2/exercises/10.3_set_up.py
Check:   python scripts/check.py 10.3
"""

import os
import tempfile
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST

TIMEOUT = timedelta(seconds=60)  # that a rank waits for the others


def start():
    """Be one rank: find out who I am, take a device, join the group, run main."""
    # TODO 1: which of the five variables says which rank of its node this one is? Each
    #         variable is a text.
    local_rank = 0
    gpus = torch.cuda.device_count()
    device = pick_device(local_rank, gpus)
    if gpus:
        torch.cuda.set_device(device)  # gather, for one, sends from the current GPU
    # TODO 3: join the group of all ranks, with pick_backend(gpus) and TIMEOUT. The call
    #         reads the other four variables by itself, but not if it gets `alone`.
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", timeout=TIMEOUT, **alone)
    main(device)
    dist.barrier()  # leave together
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()


def pick_device(local_rank, gpus):
    """Return the device of a rank on a node with so many GPUs; "cpu" if it has none."""
    # TODO 2: each rank of a node gets its own GPU. With fewer GPUs than ranks, begin
    #         again at GPU 0. Without GPUs it stays the CPU.
    return torch.device("cuda" if gpus else "cpu")


def pick_backend(gpus):
    """Return what connects the ranks. NCCL wants a GPU for each rank of a node."""
    return "nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"


def save(model, file):
    """Save the parameters; when this returns, every rank may read the file."""
    # TODO 4: one rank writes, and no rank returns before the file is complete.
    torch.save(model.state_dict(), file)


def main(device):
    """Run on every rank: train 40 steps, save, and let rank 0 compare."""
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is here", flush=True)
    make_repeatable()  # only because we compare runs
    train_set = load_mnist()
    torch.manual_seed(0)
    model = Net().to(device)
    losses = train(DistributedDataParallel(model), train_set, device)
    with tempfile.TemporaryDirectory() as folder:  # each rank its own: who writes?
        file = Path(folder) / "model.pt"
        save(model, file)
        writers = sum(gather(file.exists()))
    if dist.get_rank() == 0:
        ranks, wanted = dist.get_world_size(), os.environ["WORLD_SIZE"]
        gap = gap_to_one_process(losses, train_set, 64 * ranks, device)
        right = gap <= 1e-5 and writers == 1 and ranks == int(wanted)
        claim = f"{ranks} of {wanted} ranks in this job, saved by {writers} (limit 1)"
        gaps = f"losses within {gap:.0e} of one process (limit 1e-05)"
        print(f"=> {claim}, {gaps}: {'ok' if right else 'WRONG'}")


def train(ddp_model, train_set, device):
    """Train 40 steps on all ranks. Return the losses, the mean over the ranks."""
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.015, momentum=0.9)
    sampler = DistributedSampler(train_set, seed=0)
    losses = []
    for images, labels in islice(DataLoader(train_set, 64, sampler=sampler), 40):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)  # the sum over the ranks, in place
    return (losses / dist.get_world_size()).tolist()


def gap_to_one_process(losses, train_set, batch_size, device):
    """Train 10 steps on rank 0 alone. Return the largest difference of the losses."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    # DistributedSampler makes the same list, and all ranks together take its next part.
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(train_set), generator=generator)
    gaps = []
    for loss, indices in zip(losses[:10], order.split(batch_size)):
        images, labels = [x.index_select(0, indices) for x in train_set.tensors]
        optimizer.zero_grad()
        expected = F.cross_entropy(model(images.to(device)), labels.to(device))
        expected.backward()
        optimizer.step()
        gaps.append(abs(loss - expected.item()))
    return max(gaps)


def load_mnist():
    """Return the training set: images, uint8 [60000, 28, 28], and labels."""
    folders = [folder / "data" for folder in Path(__file__).parents]
    part = MNIST(next(x for x in folders if x.is_dir()), train=True)
    return TensorDataset(part.data, part.targets)


def make_repeatable():
    """Have a GPU compute the same numbers in each run. Slow: only to compare runs."""
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # TF32 rounds float32's 24 bits to 11


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


if __name__ == "__main__":
    if "RANK" in os.environ:  # a launcher, or you, set the five variables
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        start()
    else:  # started with python: let torchrun set them, for four ranks on one node
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
