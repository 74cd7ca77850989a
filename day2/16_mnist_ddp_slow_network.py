"""Lesson 16: when the network is the limit. Send less, and see what that costs.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  no_sync, communication hook (bf16, PowerSGD), local SGD
Run:       scripts/multinode_setup_and_run.sh day2/16_mnist_ddp_slow_network.py
Look for:  => ...: ... of plain DDP's bytes (limit ...), ..., loss ... (limit +2%): ok
Try next:  a local cluster, with scripts/local_slurm.sh link 100mbit; MATRIX_RANK = 1.
"""

import argparse
import os
import socket
import sys
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

ACCUMULATE = {"accumulation": 4}  # batches for one step
PERIODS = {"local SGD 1": 1, "local SGD 8": 8, "local SGD 32": 32}  # steps alone
WAYS = ["plain DDP", "accumulation", "bf16", "PowerSGD", *PERIODS]
MATRIX_RANK = 8  # PowerSGD sends a matrix as two thin ones, with so many columns each


def make_ddp(model, way):
    """Return the model in DDP, which sends gradients in this way; or as it is."""
    if way in PERIODS:
        return model  # not in DDP: its backward sends nothing
    if way == "PowerSGD":
        # One bucket for all: with several, this hook can hang on gloo.
        ddp_model = DistributedDataParallel(model, bucket_cap_mb=100)
        # The first steps send all: 2 at least, because DDP forms new buckets.
        state = powerSGD_hook.PowerSGDState(None, MATRIX_RANK, start_powerSGD_iter=2)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp_model
    ddp_model = DistributedDataParallel(model)
    # allreduce_hook does what DDP does without a hook, but here we can count its bytes.
    hook = send_bf16 if way == "bf16" else default_hooks.allreduce_hook
    ddp_model.register_comm_hook(None, hook)
    return ddp_model


def average_parameters(model):
    """Set the parameters to their mean over all ranks. Every rank must call this."""
    numbers = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(numbers)
    numbers /= dist.get_world_size()
    nn.utils.vector_to_parameters(numbers, model.parameters())


def train_one_epoch(model, loader, optimizer, way, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    accumulate = ACCUMULATE.get(way, 1)
    losses = []
    for step, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        send = step % accumulate == 0  # else the gradients stay, and the next are added
        # Around forward too: there DDP decides whether backward will send.
        with nullcontext() if send else model.no_sync():
            loss = F.cross_entropy(model(images), labels)
            (loss / accumulate).backward()  # divided, so that the sum is a mean
        if send:
            optimizer.step()
            optimizer.zero_grad()
        if way in PERIODS and step % PERIODS[way] == 0:
            average_parameters(model)
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(train_set, way, rank, world_size, device, args):
    """Train a new model in one of WAYS. Return it, all losses and what it has sent."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = make_ddp(model, way)
    lr = args.lr * ACCUMULATE.get(way, 1)  # it grows with the batch, as in lesson 8
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    batches = progress(loader, args.max_steps)
    with measure(device) as traffic:
        losses = train_one_epoch(ddp_model, batches, optimizer, way, device)
    if way in PERIODS:  # the last mean may be some steps ago
        average_parameters(model)
    return model, mean_over_ranks(losses, world_size), traffic


def main(device, args):
    """Run on every rank: train in each way, then compare."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_mnist(args.data_dir)
    # 4 steps reach the optimizer of "accumulation" and the matrices of PowerSGD.
    few = TensorDataset(*train_set[: 4 * args.batch_size * world_size])
    curves = {}
    rows = {}
    for way in WAYS:
        train(few, way, rank, world_size, device, args)  # a warm-up: not looked at
        model, losses, traffic = train(train_set, way, rank, world_size, device, args)
        if rank == 0:
            images = min(len(losses) * args.batch_size * world_size, len(train_set))
            accuracy = evaluate(model, test_set, device)
            rows[way] = report_way(way, images, losses, traffic, accuracy)
            curves[way] = smooth(losses)
    if rank == 0:
        write_curves(curves, images)
        return report_best(rows)


# ---- The same in every lesson that has it; explained on the page of the first one


BYTES = 0.45  # share of plain DDP's bytes, less than the half that bf16 sends
LOSS = 0.02  # how much higher the loss may be than plain DDP's


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def send_bf16(state, bucket):
    """Average a bucket of gradients, 16 bits per number. DDP calls this in backward.

    PyTorch has it too, as default_hooks.bf16_compress_hook. But that one DDP refuses
    without CUDA and NCCL, which it does not need: gloo can add such numbers as well.
    """
    gradients = bucket.buffer()  # of some parameters, in one row: float32 [N]
    short = (gradients / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(short, async_op=True).get_future()  # backward goes on

    def to_float32(future):
        return gradients.copy_(future.value()[0])

    return future.then(to_float32)  # when all of it is here


@contextmanager
def measure(device):
    """Yield a dictionary. After the with block it holds what this took.

    seconds: until all ranks were done. given: bytes that this rank gave to all_reduce.
    sent: bytes that the network counted, per rank. Every rank must call this.
    """
    traffic = {"given": 0}
    all_reduce = dist.all_reduce

    def counting(tensor, *arguments, **options):
        traffic["given"] += tensor.nbytes
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counting  # the hooks find it there
    sent = read_sent()
    begin = time.perf_counter()
    yield traffic
    torch.get_device_module(device).synchronize()
    dist.barrier()  # wait for the slowest rank
    traffic["seconds"] = time.perf_counter() - begin
    traffic["sent"] = (read_sent() - sent) / dist.get_world_size()
    dist.all_reduce = all_reduce


def read_sent():
    """Return the bytes that all nodes have sent through the interface of the ranks.

    Linux counts them. Those of all programs are in it, those of InfiniBand and NVLink
    are not. Every rank must call this.
    """
    backend = dist.get_backend().upper()
    name = os.environ.get(f"{backend}_SOCKET_IFNAME", "lo").lstrip("=")
    counters = Path("/proc/net/dev")
    sent = 0
    if counters.exists():
        for line in counters.read_text().splitlines():
            interface, _, numbers = line.partition(":")
            if interface.strip() == name:
                sent = int(numbers.split()[8])
    # All ranks of a node read the same counter, so each node counts once.
    sent_by_node = dict(gather((socket.gethostname(), sent)))
    return sum(sent_by_node.values())


def report_way(way, images, losses, traffic, accuracy):
    """Print a row of the table, numbers per step, and return it as a dictionary."""
    steps = len(losses)
    row = {
        "given": traffic["given"] / steps / 1e6,
        "sent": traffic["sent"] / steps / 1e6,
        "ms": traffic["seconds"] / steps * 1e3,
        "speed": images / traffic["seconds"],
        "loss": losses[steps * 3 // 4 :].mean().item(),  # of the last quarter
    }
    if way == WAYS[0]:
        print("per step     MB given  MB sent       ms images/s   loss accuracy")
    sizes = f"{row['given']:8.3f} {row['sent']:8.3f} {row['ms']:8.1f}"
    print(f"{way:12} {sizes} {row['speed']:8,.0f} {row['loss']:6.3f} {accuracy:8.2%}")
    return row


def report_best(rows):
    """Print the proof: of the ways that learn as well, the one that sends least."""
    plain = rows["plain DDP"]
    best = "plain DDP"
    for way, row in rows.items():
        as_well = row["loss"] / plain["loss"] - 1 <= LOSS
        if as_well and 0 < row["given"] < rows[best]["given"]:
            best = way
    # Of the bytes given: what the network has counted may be other programs' as well.
    share = rows[best]["given"] / plain["given"]
    speed = rows[best]["speed"] / plain["speed"]
    loss = rows[best]["loss"] / plain["loss"] - 1
    sends = f"{best}: {share:.2f} of plain DDP's bytes (limit {BYTES:g})"
    gain = f"in one run {speed:.1f} times its images/s"
    claim = f"{sends}, {gain}, loss {loss:+.1%} (limit {LOSS:+.0%})"
    return prove(claim, share <= BYTES and loss <= LOSS)


def smooth(losses, points=20):
    """Return the means of this many equal parts of the losses: one batch is noisy."""
    return F.adaptive_avg_pool1d(losses.unsqueeze(0), points).squeeze(0).cpu()


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


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


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
    """Lesson 2's, but with 3.3 MB of gradients: uint8 [N, 28, 28] to scores [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 1536)
        self.fc2 = nn.Linear(1536, 10)

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
    add("--batch-size", type=positive_int, default=32, help="per process (32)")
    add("--lr", type=positive_float, default=0.005, help="learning rate (0.005)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, default=64, help="in each way (64)")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
