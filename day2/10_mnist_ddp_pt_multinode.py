"""Lesson 10: lesson 8 across nodes. Only the set-up changes.

Builds on: 8_mnist_ddp_pt_lr.py
New here:  the launcher's variables instead of launch
Run:       scripts/multinode_setup_and_run.sh day2/10_mnist_ddp_pt_multinode.py
Look for:  => gap to the loss curve of one process: 152% unscaled, 23% linear
Try next:  the same number of ranks on one node: python day1/8_mnist_ddp_pt_lr.py 4
"""

import argparse
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
    # Slurm may show each task one GPU only: then the node has more than this rank can see.
    count = max(count, int(os.environ.get("SLURM_GPUS_ON_NODE", 0)))
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


def train_one_epoch(model, optimizer, scheduler, batches):
    """Train on each batch once. Return [2, steps]: loss summed over the batch; batch size."""
    history = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        # No .item() here: the CPU would wait for the GPU in every step.
        history.append(torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))]))
    return torch.stack(history, dim=1)


def write_curves(curves, seen):
    """Write losses over the images seen to runs/, for TensorBoard and as a picture."""
    from matplotlib.figure import Figure  # here, because only rank 0 needs it
    from torch.utils.tensorboard import SummaryWriter

    folder, axes = Path("runs", Path(__file__).stem), Figure().subplots()
    for name, losses in curves.items():
        axes.semilogy(seen, losses, label=name)
        with SummaryWriter(folder / name, purge_step=0) as writer:
            for step, loss in zip(seen.int().tolist(), losses):
                writer.add_scalar("loss/train", loss, step)
    axes.set(xlabel="images seen", ylabel="training loss")
    axes.legend().figure.savefig(folder / "loss.png")


def train(images, labels, args, rank, world_size, factor):
    """Train with the learning rate times factor. Return the loss curve: 20 points."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(images.device)
    if world_size > 1:
        model = DistributedDataParallel(model)  # averages the gradients during backward
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * factor, momentum=0.9)
    # New weights may not stand a large rate yet: start at 1 / factor of it, then raise it.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / factor, total_iters=args.warm_up)
    # The ranks shuffle alike, then each takes every world_size-th image.
    sampler = DistributedSampler(images, world_size, rank, seed=args.seed)
    steps = batches(images, labels, sampler, args.batch_size, None)
    history = train_one_epoch(model, optimizer, scheduler, steps)
    if world_size > 1:
        dist.all_reduce(history)  # losses and images of all ranks, step by step
    return torch.div(*F.adaptive_avg_pool1d(history, 20).cpu())  # means: one batch is noisy


def main(device, data, args):
    """Run on every rank: train alone, together, together with a scaled rate. Compare."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = args.max_steps and args.max_steps * args.batch_size * world_size
    images, labels = data[0][:count].to(device), data[1][:count].to(device)  # the same for all
    factor = world_size if args.scaling == "linear" else world_size**0.5
    plan = {"alone": (1, 1), "unscaled": (world_size, 1), args.scaling: (world_size, factor)}
    patient, runs = dist.new_group(timeout=timedelta(days=1)), {}
    for name, (ranks, rate) in plan.items():
        dist.barrier(patient)  # here the others wait while rank 0 trains alone
        if rank < ranks:
            runs[name] = train(images, labels, args, rank, ranks, rate)
        if rank == 0:
            batch, lr, loss = ranks * args.batch_size, args.lr * rate, runs[name].mean()
            print(f"{name}: global batch {batch}, learning rate {lr:g}, mean loss {loss:.4f}")
    if rank == 0:
        write_curves(runs, torch.linspace(0, len(images), 21)[1:])
        gaps = [f"{(y / runs['alone'] - 1).abs().mean():.0%} {name}" for name, y in runs.items()]
        print(f"=> gap to the loss curve of one process: {', '.join(gaps[1:])}")


def start(*arguments):
    """Be one rank, as the variables say: join the process group, run main, leave the group."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), os.environ.get("LOCAL_WORLD_SIZE")
    device, backend = choose_device(local_rank, int(local_world_size or 1))
    gloo, wait = backend == "gloo", timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group(backend, timeout=wait, device_id=None if gloo else device)
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    main(device, *arguments)
    dist.barrier()  # leave together; a rank that fails never gets here and ends the job
    dist.destroy_process_group()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64, help="images per process (64)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate (0.005)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, help="end after this many steps of all ranks")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--scaling", choices=["linear", "sqrt"], default="linear")
    parser.add_argument("--warm-up", type=int, default=12, help="steps of it (12)")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(load_mnist(args.data_dir), args)
