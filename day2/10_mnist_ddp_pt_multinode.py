"""Lesson 10: lesson 8 across nodes. Only the set-up changes.

Builds on: 8_mnist_ddp_pt_lr.py
New here:  the launcher's variables instead of launch
Run:       scripts/multinode_setup_and_run.sh day2/10_mnist_ddp_pt_multinode.py
Look for:  => gap to the loss curve ...: ... unscaled, ... linear (limit ...): ok
Try next:  the same number of ranks on one node: python day1/8_mnist_ddp_pt_lr.py 4
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm


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


def train(train_set, rank, world_size, lr, device, args):
    """Train a new model on world_size ranks. Return it and the losses of all steps."""
    global_batch_size = args.batch_size * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = model
    if world_size > 1:
        ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # At first a large rate can diverge: begin with args.lr, then raise it to lr.
    scheduler = LinearLR(optimizer, start_factor=args.lr / lr, total_iters=args.warm_up)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = progress(loader)
        epoch_losses = train_one_epoch(ddp_model, batches, optimizer, scheduler, device)
        losses.append(mean_over_ranks(epoch_losses, world_size))
        images_seen = min(len(epoch_losses) * global_batch_size, len(train_set))
        report_epoch(epoch, losses[-1], images_seen, begin)
    return model, torch.cat(losses)


def main(device, args):
    """Run on every rank: train alone, then together, then with a scaled rate."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_mnist(args.data_dir)
    train_set = TensorDataset(*train_set[: args.images])  # the same images in each run
    factor = world_size if args.scaling == "linear" else world_size**0.5
    runs = {"alone": (1, args.lr), "unscaled": (world_size, args.lr)}
    runs[args.scaling] = (world_size, args.lr * factor)
    no_limit = dist.new_group(timeout=timedelta(days=1))
    curves = {}
    for name, (ranks, lr) in runs.items():
        dist.barrier(no_limit)  # here the others wait while rank 0 trains alone
        if rank < ranks:
            model, losses = train(train_set, rank, ranks, lr, device, args)
        if rank == 0:
            accuracy = evaluate(model, test_set, device)
            report_run(name, ranks * args.batch_size, lr, losses, accuracy)
            curves[name] = smooth(losses)
    if rank == 0:
        write_curves(curves, args.epochs * len(train_set))
        return prove(*compare_curves(curves))


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def smooth(losses, points=20):
    """Return the means of this many equal parts of the losses: one batch is noisy."""
    return F.adaptive_avg_pool1d(losses.unsqueeze(0), points).squeeze(0).cpu()


def report_run(name, batch_size, lr, losses, accuracy):
    """Print what a run was and what it came to. batch_size: the global one."""
    setting = f"global batch {batch_size}, learning rate {lr:g}"
    result = f"mean loss {losses.mean():.4f}, test accuracy {accuracy:.2%}"
    print(f"{name}: {setting}, {result}")


def write_curves(curves, images):
    """Write curves over the images seen to runs/, for TensorBoard and as a picture."""
    from matplotlib.figure import Figure  # here: only rank 0 needs these two
    from torch.utils.tensorboard import SummaryWriter

    folder = Path("runs", Path(__file__).stem)
    axes = Figure().subplots()
    for name, curve in curves.items():
        seen = [round(images * (i + 1) / len(curve)) for i in range(len(curve))]
        axes.semilogy(seen, curve, label=name)
        with SummaryWriter(folder / name, purge_step=0) as writer:
            for step, loss in zip(seen, curve, strict=True):
                writer.add_scalar("loss/train", loss, step)
    axes.set(xlabel="images seen", ylabel="training loss")
    axes.legend()
    axes.figure.savefig(folder / "loss.png")


def compare_curves(curves):
    """Return how far curves are from the first one, as a text; and if scaling helps.

    The distance is the mean over the curve, as a share of the first one.
    """
    first, unscaled, scaled = curves
    gaps = {}
    for name in (unscaled, scaled):
        gaps[name] = (curves[name] / curves[first] - 1).abs().mean().item()
    limit = 0.9 * gaps[unscaled]
    both = f"{gaps[unscaled]:.0%} unscaled, {gaps[scaled]:.0%} {scaled}"
    claim = f"gap to the loss curve of one process: {both} (limit {limit:.0%})"
    return claim, gaps[scaled] <= limit


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


def report_epoch(epoch, losses, images, begin):
    """Print the mean loss of an epoch's steps, and images/s, on rank 0."""
    loss = losses.mean().item()  # waits for the device: only now may we read the clock
    speed = images / (time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the share of the test images that the model gets right, from 0 to 1."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    correct = 0
    for images, labels in DataLoader(test_set, batch_size=1000):
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(test_set)


def load_mnist(data_dir):
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    from torchvision.datasets import MNIST  # here, because importing it takes a second

    train_set, test_set = MNIST(data_dir, train=True), MNIST(data_dir, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


def progress(loader, max_steps=None):
    """Return the loader's first batches, with a bar if rank 0 writes to a terminal."""
    steps = min(len(loader), max_steps or len(loader))
    hidden = None if os.environ.get("RANK", "0") == "0" else True
    # disable=None hides the bar where there is no terminal.
    return tqdm(islice(loader, steps), total=steps, disable=hidden, leave=False)


class Net(nn.Module):
    """A small convolutional network: uint8 [N, 28, 28] to scores, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = images.unsqueeze(1) / 255  # float32 [N, 1, 28, 28], from 0 to 1
        x = (x - 0.1307) / 0.3081  # mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind in ("cpu", "mps"):  # there are no collectives for Apple's GPU
        return torch.device("cpu"), "gloo"
    device = torch.device(kind, local_rank % count)
    # Where Slurm shows a rank only its own GPU, the launcher says how many there are.
    # Parts of a GPU (MIG) do not count: NCCL takes two of them for the same GPU.
    if count == 1 and "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        count = int(os.environ.get("GPUS_ON_NODE", 1))
    shared = local_world_size > count
    if kind == "xpu" and (shared or not dist.is_xccl_available()):
        return torch.device("cpu"), "gloo"  # gloo cannot carry tensors of Intel's GPUs
    torch.accelerator.set_device_index(device.index)
    # We compare runs: a run must give the same numbers again, with little rounding
    # (TF32 keeps 11 of float32's 24 bits). A real job may leave out these lines.
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    torch.backends.cuda.matmul.allow_tf32 = False  # True in NVIDIA's containers
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and newer
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def start(*arguments):
    """Run as one rank: join the process group, call main, leave the group."""
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, backend = choose_device(local_rank, local_world_size)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    # NCCL's other way to connect hangs at random before torch 2.7.1 (pytorch#153960).
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    device_id = None if backend == "gloo" else device  # with it, NCCL connects at once
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        setting = f"device: {device.type}, backend: {backend}"
        print(f"ranks: {dist.get_world_size()}, {setting}")
    status = main(device, *arguments)
    # The others wait here while rank 0 still works, at most as long as the timeout.
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    # gloo's threads may still be freeing tensors, and need Python for that. Without a
    # pause, torch before 2.8 can hang in the next line (pytorch#154976), and Python can
    # abort while it ends.
    time.sleep(0.2)
    dist.destroy_process_group()
    sys.exit(status)  # of rank 0: whether the lesson has proved its claim


def positive_int(text):
    """Return an argument as a whole number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        problem = f"must be a whole number greater than 0, not {text}"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def positive_float(text):
    """Return an argument as a number greater than 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return number


def mnist_folder(text):
    """Return an argument as a path, if MNIST is there, in files of the right size."""
    sizes = {"train-images-idx3": 47_040_016, "train-labels-idx1": 60_008}
    sizes |= {"t10k-images-idx3": 7_840_016, "t10k-labels-idx1": 10_008}
    for name, size in sizes.items():
        file = Path(text, "MNIST", "raw", f"{name}-ubyte")
        if not file.exists() or file.stat().st_size != size:
            todo = "Restore it: git checkout data/MNIST"
            raise argparse.ArgumentTypeError(f"{file} is missing or damaged. {todo}")
    return Path(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--epochs", type=positive_int, default=1, help="epochs (1)")
    add("--batch-size", type=positive_int, default=8, help="per process (8)")
    add("--lr", type=positive_float, default=0.00125, help="learning rate (0.00125)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--images", type=positive_int, default=20_000, help="training images (20000)")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    add("--scaling", choices=["linear", "sqrt"], default="linear")
    add("--warm-up", type=positive_int, default=8, help="steps of it (8)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
