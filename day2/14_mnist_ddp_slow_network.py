"""Lesson 14: when the network is the limit. Send less, and see what that costs.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  no_sync, communication hook (bf16, PowerSGD), local SGD and DiLoCo
Run:       scripts/multinode_setup_and_run.sh day2/14_mnist_ddp_slow_network.py
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
from torchvision.datasets import MNIST

ACCUMULATE = {"accumulation": 4}  # batches for one step
MATRIX_RANK = 8  # PowerSGD sends a matrix as two thin ones, with this many columns each
# Steps that each rank takes alone; learning rate and momentum of the step that follows.
OUTER = {
    "local SGD 8": (8, 1, 0),
    "local SGD 32": (32, 1, 0),
    "DiLoCo 32": (32, 0.7, 0.9),
}
WAYS = ["plain DDP", "accumulation", "bf16", "PowerSGD", *OUTER]


def make_ddp(model, way):
    """Return the model in DDP, which sends gradients in this way; or as it is."""
    if way in OUTER:
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


def send_bf16(state, bucket):
    """Average gradients with 16 bits per number: PyTorch's hook, but also on CPUs."""
    # By its own name DDP refuses this hook where there is no CUDA.
    return default_hooks.bf16_compress_hook(state, bucket)


class OuterOptimizer:
    """Brings ranks that have trained alone together again: local SGD or DiLoCo."""

    def __init__(self, model, way):
        self.period, lr, momentum = OUTER[way]
        self.model = model
        assert len({x.dtype for x in model.parameters()}) == 1, "two dtypes"
        # Where the ranks were together last. A copy, which only step() changes.
        self.shared = nn.utils.parameters_to_vector(model.parameters()).detach()
        nesterov = momentum > 0
        self.sgd = torch.optim.SGD([self.shared], lr, momentum, nesterov=nesterov)

    def step(self):
        """Take the same step on all ranks. Every rank must call this."""
        mean = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        # The way back from the mean serves as the gradient. With rate 1 and without
        # momentum, the step leads to the mean.
        self.shared.grad = self.shared - mean
        self.sgd.step()
        nn.utils.vector_to_parameters(self.shared.clone(), self.model.parameters())


def train_one_epoch(model, loader, optimizer, outer, way, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    accumulate = ACCUMULATE.get(way, 1)
    losses = []
    for step, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        send = step % accumulate == 0  # otherwise they stay, and the next are added
        # Around forward too: there DDP decides whether backward will send.
        with nullcontext() if send else model.no_sync():
            loss = F.cross_entropy(model(images), labels)
            (loss / accumulate).backward()  # divided, so that the sum is a mean
        if send:
            optimizer.step()
            optimizer.zero_grad()
        if outer and step % outer.period == 0:
            outer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(train_set, way, device, args):
    """Train a new model in one of WAYS. Return it, all losses and what it has sent."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied rank 0's to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = make_ddp(model, way)
    lr = args.lr * ACCUMULATE.get(way, 1)  # it grows with the batch, as in lesson 8
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    outer = OuterOptimizer(model, way) if way in OUTER else None
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    full = max(1, len(sampler) // args.batch_size)  # a smaller one would count as much
    batches = islice(loader, min(full, args.max_steps))
    with measure(device) as traffic:
        losses = train_one_epoch(ddp_model, batches, optimizer, outer, way, device)
        if outer and len(losses) % outer.period != 0:
            outer.step()  # after the last steps alone
    dist.all_reduce(losses)  # each rank knows only its own
    return model, losses / dist.get_world_size(), traffic


def main(device, args):
    """Run on every rank: train in each way, then compare."""
    make_repeatable()  # only because we compare runs
    train_set, test_set = load_mnist()
    # 4 steps reach the optimizer of "accumulation" and the matrices of PowerSGD.
    few = TensorDataset(*train_set[: 4 * args.batch_size * dist.get_world_size()])
    rows = {}
    for way in WAYS:
        train(few, way, device, args)  # a warm-up: not looked at
        model, losses, traffic = train(train_set, way, device, args)
        if dist.get_rank() == 0:
            accuracy = evaluate(model, test_set, device)
            rows[way] = report_way(way, losses, traffic, accuracy, args)
    if dist.get_rank() == 0:
        return report_best(rows)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
BYTES = 0.45  # share of plain DDP's bytes, less than the half that bf16 sends
LOSS = 0.02  # how much higher the loss may be than plain DDP's


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


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

    Linux counts them, for all programs together, but without InfiniBand and NVLink.
    Every rank must call this.
    """
    backend = dist.get_backend().upper()
    name = os.environ.get(f"{backend}_SOCKET_IFNAME", "lo").lstrip("=")
    counters = Path("/proc/net/dev")  # of this node, also where it is a container
    sent = 0
    if counters.exists():
        for line in counters.read_text().splitlines():
            interface, _, numbers = line.partition(":")
            if interface.strip() == name:
                sent = int(numbers.split()[8])
    # All ranks of a node read the same counter, so each node counts once.
    sent_by_node = dict(gather((socket.gethostname(), sent)))
    return sum(sent_by_node.values())


def report_way(way, losses, traffic, accuracy, args):
    """Print a row of the table, numbers per step, and return it as a dictionary."""
    steps = len(losses)
    images = steps * args.batch_size * dist.get_world_size()
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
    # Of the bytes given, because the network also counts other programs' bytes.
    share = rows[best]["given"] / plain["given"]
    speed = rows[best]["speed"] / plain["speed"]
    loss = rows[best]["loss"] / plain["loss"] - 1
    sends = f"{best}: {share:.2f} of plain DDP's bytes (limit {BYTES:g})"
    gain = f"in one run {speed:.1f} times its images/s"
    claim = f"{sends}, {gain}, loss {loss:+.1%} (limit {LOSS:+.0%})"
    return prove(claim, share <= BYTES and loss <= LOSS)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
    """Lesson 2's, but with 3.3 MB of gradients: uint8 [N, 28, 28] to scores [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 1536)
        self.fc2 = nn.Linear(1536, 10)

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


def start(args):
    """Run as one rank: join the process group, call main, leave the group."""
    # Variables tell a process who it is. LOCAL_RANK: its number on this node. The other
    # four, RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, are for init_process_group.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--batch-size", type=int, default=32, help="per process (32)")
    add("--lr", type=float, default=0.005, help="learning rate (0.005)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, default=64, help="in each way (64)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
