"""Lesson 8: more ranks make a larger global batch, which wants a larger learning rate.

Builds on: 6_mnist_ddp_pt.py
New here:  global batch, linear scaling rule, warm-up (Goyal et al., arXiv:1706.02677)
Run:       python day1/8_mnist_ddp_pt_lr.py [processes]
Look for:  => gap to the loss curve ...: ... unscaled, ... linear (limit ...): ok
Try next:  --scaling sqrt; --lr 0.005, four times as large; 8 processes.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST


def train_one_epoch(model, loader, optimizer, scheduler, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(train_set, world_size, lr, device, args):
    """Train a new model on world_size ranks. Return it and the losses of all steps."""
    global_batch_size = args.batch_size * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model copies rank 0's parameters to all: the seed only makes runs comparable.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model, whose parameters it shares, is on this rank's device.
    ddp_model = model
    if world_size > 1:
        ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # At first a large rate can diverge: begin with args.lr, then raise it to lr.
    scheduler = LinearLR(optimizer, start_factor=args.lr / lr, total_iters=args.warm_up)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, world_size, dist.get_rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        epoch_losses = train_one_epoch(ddp_model, loader, optimizer, scheduler, device)
        if world_size > 1:
            dist.all_reduce(epoch_losses)  # the sum over the ranks, in place
        losses.append(epoch_losses / world_size)
        images_seen = min(len(epoch_losses) * global_batch_size, len(train_set))
        loss = losses[-1].mean().item()  # waits for the device: only now read the clock
        speed = images_seen / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")
    return model, torch.cat(losses)


def main(device, args):
    """Run on every rank: train alone, then together, then with a scaled rate."""
    make_repeatable()  # only because we compare runs
    train_set, test_set = load_mnist()
    images, labels = train_set[: args.images]  # the same in each run
    train_set = TensorDataset(images, labels)
    world_size = dist.get_world_size()
    factor = world_size if args.scaling == "linear" else world_size**0.5
    runs = {"alone": (1, args.lr), "unscaled": (world_size, args.lr)}
    runs[args.scaling] = (world_size, args.lr * factor)
    waiting = dist.new_group(timeout=timedelta(hours=1))  # for waits that may take long
    curves = {}
    for name, (ranks, lr) in runs.items():
        dist.barrier(waiting)  # here the others wait while rank 0 trains alone
        if dist.get_rank() < ranks:
            model, losses = train(train_set, ranks, lr, device, args)
        if dist.get_rank() == 0:
            curves[name] = smooth(losses)
            accuracy = evaluate(model, test_set, device)
            report_run(name, ranks * args.batch_size, lr, losses, accuracy)
    if dist.get_rank() == 0:
        write_curves(curves, args.epochs * len(train_set))
        return compare_curves(curves)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def smooth(losses, points=20):
    """Return the means of this many equal parts of the losses: one batch is noisy."""
    return F.adaptive_avg_pool1d(losses.unsqueeze(0), points).squeeze(0).cpu()


def report_run(name, batch_size, lr, losses, accuracy):
    """Print the settings of a run and its results. batch_size: the global one."""
    setting = f"global batch {batch_size}, learning rate {lr:g}"
    result = f"mean loss {losses.mean():.4f}, test accuracy {accuracy:.2%}"
    print(f"{name}: {setting}, {result}")


def write_curves(curves, images):
    """Write each curve to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    for name, curve in curves.items():
        with SummaryWriter(f"{FOLDER}/{name}", purge_step=0) as writer:
            for part, loss in enumerate(curve.tolist(), start=1):
                writer.add_scalar("loss/train", loss, part * images // len(curve))


def compare_curves(curves):
    """Print the proof line: how far curves are from the first one. Return the status.

    The distance is the mean over the curve, as a share of the first one.
    """
    first, unscaled, scaled = curves
    gaps = {}
    for name in (unscaled, scaled):
        gaps[name] = (curves[name] / curves[first] - 1).abs().mean().item()
    limit = 0.9 * gaps[unscaled]
    both = f"{gaps[unscaled]:.0%} unscaled, {gaps[scaled]:.0%} {scaled}"
    claim = f"gap to the loss curve of one process: {both} (limit {limit:.0%})"
    return prove(claim, gaps[scaled] <= limit)


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the share of the test images that the model gets right, from 0 to 1."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    correct = 0
    for images, labels in DataLoader(test_set, batch_size=1000):
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(test_set)


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
    add("--epochs", type=int, default=1, help="epochs (1)")
    add("--batch-size", type=int, default=8, help="per process (8)")
    add("--lr", type=float, default=0.00125, help="learning rate (0.00125)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--images", type=int, default=20_000, help="training images (20000)")
    add("--scaling", choices=["linear", "sqrt"], default="linear")
    add("--warm-up", type=int, default=8, help="steps of it (8)")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name in ("seed", "warm_up") else 1e-9
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
