"""Lesson 4: share the images out, average the gradients. This is data parallelism.

Builds on: 3_mnist_distributed.py
New here:  DistributedSampler, average_gradients
Run:       python day1/4_mnist_manual_ddp.py [processes]
Look for:  => parameters identical on all ranks, losses within 5e-07 of one process
Try next:  do not divide by world_size; all_reduce each gradient by itself: how much slower?
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler
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


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    gradients = [parameter.grad for parameter in model.parameters()]
    # All of them in one message: every message costs time, however short it is.
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    nn.utils.vector_to_parameters(flat / world_size, gradients)  # the mean, not the sum


def train_one_epoch(model, optimizer, batches, world_size):
    """Train on each batch once. Return [2, steps]: loss summed over the batch; batch size."""
    history = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if world_size > 1:
            average_gradients(model, world_size)
        optimizer.step()
        # No .item() here: the CPU would wait for the GPU in every step.
        history.append(torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))]))
    return torch.stack(history, dim=1)


def train(images, labels, args, rank, world_size):
    """Train a new model on world_size ranks. Return it, the history and the sampler."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # The ranks shuffle alike, then each takes every world_size-th image.
    sampler = DistributedSampler(images, world_size, rank, seed=args.seed)
    histories = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        steps = batches(images, labels, sampler, args.batch_size, args.max_steps)
        histories.append(train_one_epoch(model, optimizer, steps, world_size))
        if world_size > 1:
            dist.all_reduce(histories[-1])  # losses and images of all ranks, step by step
        # Reading the sums waits for the device. Only then is it fair to read the clock.
        loss, count = histories[-1].sum(1).tolist()
        speed = count / (time.perf_counter() - begin)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss / count:.4f}, {speed:,.0f} images/s")
    return model, torch.cat(histories, dim=1), sampler


def main(device, data, args):
    """Run on every rank: train, check, report."""
    images, labels = data[0].to(device), data[1].to(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, history, sampler = train(images, labels, args, rank, world_size)
    visits = torch.bincount(torch.tensor(list(sampler)), minlength=len(images)).to(device)
    dist.all_reduce(visits)
    # The ranks agree where the largest value among them is the smallest too.
    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    largest = torch.stack([values, -values])  # the largest of -values is minus the smallest
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"visited exactly once an epoch: {(visits == 1).sum():,} of {len(images):,} images")
        steps, batch_size = min(20, args.max_steps or 20), args.batch_size * world_size
        print(f"now one process alone, {steps} batches of {batch_size} images:")
        alone = vars(args) | {"batch_size": batch_size, "max_steps": steps, "epochs": 1}
        _, expected, _ = train(images, labels, argparse.Namespace(**alone), rank=0, world_size=1)
        gap = (history[0, :steps] / history[1, :steps] - expected[0] / expected[1]).abs().max()
        same = "identical" if torch.equal(largest[0], -largest[1]) else "DIFFERENT"
        print(f"=> parameters {same} on all ranks, losses within {gap:.0e} of one process")


def start(local_rank, *arguments):
    """Be one rank: join the process group, run main, leave the group."""
    if launcher := mp.parent_process():  # end with it, however it ends
        threading.Thread(target=lambda: launcher.join() or os._exit(1), daemon=True).start()
    os.environ.setdefault("RANK", str(local_rank))
    device, backend = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    gloo, wait = backend == "gloo", timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group(backend, timeout=wait, device_id=None if gloo else device)
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    main(device, *arguments)
    dist.barrier()  # leave together; a rank that fails never gets here and ends the job
    dist.destroy_process_group()


def launch(processes, *arguments):
    """Start the ranks on this machine, with the variables that torchrun or Slurm would set."""
    if "RANK" in os.environ:  # torchrun or Slurm has started this process as one of the ranks
        return start(int(os.environ["LOCAL_RANK"]), *arguments)
    # The ranks find each other through a small server here. Port 0: the system picks a free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 starts no server of its own
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    # Share the cores out: ranks that each want all of them slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every rank, with no traceback
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        mp.set_forkserver_preload(["torch", "torch._dynamo"])  # which every optimizer wants
    mp.start_processes(start, args=arguments, nprocs=processes, start_method="forkserver")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processes", nargs="?", type=int, default=4, help="how many (4)")
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
    launch(args.processes, load_mnist(args.data_dir), args)  # the ranks share the data's memory
