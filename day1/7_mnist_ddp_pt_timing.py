"""Lesson 7: how much faster are more processes? Timed honestly.

Builds on: 6_mnist_ddp_pt.py
New here:  warm-up, synchronize, weak and strong scaling
Run:       python day1/7_mnist_ddp_pt_timing.py [processes]
Look for:  => ... processes: weak ..., strong ...; losses within ... (limit 1e-05): ok
Try next:  1 process: how far from 1 is a gain that must be 1? --batch-size 8 and 512.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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


def train(train_set, world_size, batch_size, device, args):
    """Train a new model on world_size ranks. Return it, the losses and the images/s."""
    global_batch_size = batch_size * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model copies rank 0's parameters to all: the seed only makes runs comparable.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model, whose parameters it shares, is on this rank's device.
    ddp_model = model
    if world_size > 1:
        ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, world_size, dist.get_rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    losses = []
    # Epoch 0 is the warm-up: it allocates memory, chooses kernels, connects the ranks.
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        # The calls return before a GPU has done the work. Wait, then read the clock.
        torch.get_device_module(device).synchronize()
        begin = time.perf_counter()
        batches = islice(loader, args.max_steps)
        epoch_losses = train_one_epoch(ddp_model, batches, optimizer, device)
        torch.get_device_module(device).synchronize()
        seconds = time.perf_counter() - begin
        if world_size > 1:
            dist.all_reduce(epoch_losses)  # the sum over the ranks, in place
        losses.append(epoch_losses / world_size)
        images_seen = min(len(epoch_losses) * global_batch_size, len(train_set))
    return model, torch.cat(losses), images_seen / seconds


def main(device, args):
    """Run on every rank: time each setting in every round, then compare them."""
    make_repeatable()  # only because we compare runs
    train_set, test_set = load_mnist()
    world_size = dist.get_world_size()
    share = max(1, args.batch_size // world_size)
    batch_size = share * world_size  # so that the ranks can share it
    settings = {  # ranks, and the images of each in a step
        "one process": (1, batch_size),
        "weak scaling": (world_size, batch_size),
        "strong scaling": (world_size, share),
    }
    waiting = dist.new_group(timeout=timedelta(hours=1))  # for waits that may take long
    results = {name: [] for name in settings}
    for number in range(1, args.rounds + 1):  # a machine's speed varies over time
        for name, (ranks, images) in settings.items():
            dist.barrier(waiting)  # here the others wait while rank 0 trains alone
            if dist.get_rank() < ranks:
                results[name].append(train(train_set, ranks, images, device, args))
        if dist.get_rank() == 0:
            speeds = [f"{name} {x[-1][2]:,.0f}" for name, x in results.items()]
            print(f"round {number} of {args.rounds}, images/s: {', '.join(speeds)}")
    if dist.get_rank() == 0:
        model, losses, _ = results["strong scaling"][-1]
        write_scalars(losses, batch_size)
        print(f"test accuracy: {evaluate(model, test_set, device):.2%}")
        return report_timing(settings, results)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def report_timing(settings, results):
    """Print the medians of each setting. Print the proof line; return the exit status.

    settings: {name: (ranks, images of each in a step)}
    results: {name: [what train returned, in each round]}
    """
    baseline = [speed for _, _, speed in results["one process"]]
    head = "batch global ms/step s/epoch images/s  times one process"
    print(f"{f'median of {len(baseline)} rounds':22} {head}")
    gains = {}
    for name, (ranks, batch_size) in settings.items():
        speeds = [speed for _, _, speed in results[name]]
        # Divided within each round: if the machine was busy then, it was busy for both.
        ratios = [speed / alone for speed, alone in zip(speeds, baseline)]
        gains[name] = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        speed = median(speeds)
        total = batch_size * ranks
        sizes = f"{batch_size:5} {total:6} {1000 * total / speed:7.1f}"
        print(f"{name:22} {sizes} {60_000 / speed:7.2f} {speed:8,.0f}  {gains[name]}")
    # Strong scaling only divides the work, so the losses must equal one process's.
    _, expected, _ = results["one process"][0]
    _, losses, _ = results["strong scaling"][0]
    gap = (losses - expected)[:10].abs().max().item()  # later, rounding adds up
    gained = f"weak {gains['weak scaling']}, strong {gains['strong scaling']}"
    gaps = f"losses within {gap:.0e} of one process (limit {ROUNDING:.0e})"
    claim = f"{ranks} processes: {gained} times the images/s; {gaps}"
    return prove(claim, gap <= ROUNDING)


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


def start(args, url=None):
    """Run as one rank: join the process group, call main, leave the group."""
    # LOCAL_RANK: which rank of this node it is. init_process_group needs to know where
    # all ranks meet: at the url or, under torchrun, where two more variables say.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, url, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def start_rank(rank, args, url):
    """Run as this rank of one node."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # they end it, with no traceback
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(start(args, f"{url}?rank={rank}&world_size={args.processes}"))


def launch(args):
    """Start the ranks on this machine, with the variables that torchrun would set."""
    copies = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE", "1")
    if copies != "1":
        sys.exit(f"mpirun has started this {copies} times: use torchrun instead")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    world_size = str(args.processes)
    os.environ.update(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    linux = sys.platform == "linux"
    loopback = "lo" if linux else "lo0"  # what ranks send stays on this machine
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    method = "fork" if linux else "spawn"
    with tempfile.TemporaryDirectory() as folder:  # no other user can open it
        given = (args, f"file://{folder}/ranks")  # a file in which they meet
        try:
            mp.start_processes(start_rank, given, args.processes, start_method=method)
        except mp.ProcessExitedException as error:
            sys.exit(str(error))  # a rank was killed, or has printed what is wrong
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for process in mp.active_children():
                process.kill()
                process.join()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("processes", nargs="?", type=int, help="how many (4)")
    add("--rounds", type=int, default=5, help="how often to time each (5)")
    add("--epochs", type=int, default=2, help="the last one is timed (2)")
    add("--batch-size", type=int, default=256, help="of one process (256)")
    add("--lr", type=float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, default=20, help="of an epoch (20)")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    ranks = int(os.environ.get("WORLD_SIZE", args.processes or 4))
    if not 0 < ranks <= 1000 or args.processes not in (None, ranks):
        parser.error("processes must be 1 to 1000, or WORLD_SIZE, which torchrun sets")
    args.processes = ranks
    timeout = os.environ.get("DIST_TIMEOUT", "60")
    if not timeout.isdecimal() or not 0 < int(timeout) < 2**31:
        parser.error(f"DIST_TIMEOUT is {timeout}, not a number of seconds")
    return args


if __name__ == "__main__":
    args = parse_args()
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        sys.exit(start(args))
    else:
        launch(args)
