"""Lesson 16: when the network is the limit. Send less, and see what that costs.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  no_sync, communication hook (bf16, PowerSGD), latency against bandwidth
Run:       scripts/multinode_setup_and_run.sh day2/16_mnist_ddp_slow_network.py
Look for:  => PowerSGD: 0.07 of plain DDP's bytes, 0.6 times its images/s, loss +1.0%
Try next:  a local cluster, with scripts/local_slurm.sh link 100mbit; MATRIX_RANK = 1.
"""

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

MATRIX_RANK = 8  # PowerSGD sends a matrix as two thin ones, with so many columns each
PLAIN = default_hooks.allreduce_hook  # does what DDP does by itself
WAYS = {  # name: batches for a step of the optimizer, options of DistributedDataParallel, hook
    "no messages": (1, {}, None),  # every rank for itself: how long computing takes
    "plain DDP": (1, {}, PLAIN),
    "one bucket": (1, {"bucket_cap_mb": 100}, PLAIN),
    "accumulation": (4, {}, PLAIN),
    "bf16": (1, {}, default_hooks.bf16_compress_hook),  # gradients only: buffers go as they are
    # With several buckets this hook can stand still on gloo: one waits for the thread of another.
    "PowerSGD": (1, {"bucket_cap_mb": 100}, powerSGD_hook.powerSGD_hook),
}
HEAD = "a step       messages MB given  MB sent       ms predicted images/s   loss"
ROW = "{:12} {messages:8.2f} {given:8.3f} {sent:8.3f} {ms:8.1f} {:9.1f} {speed:8,.0f} {loss:6.3f}"


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


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def time_all_reduce(numbers, device, repeats=10):
    """Return the seconds that one all_reduce of this many float32 numbers takes."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor)  # the first call sets up connections: not timed
    torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    # A GPU only notes what to do and works on: without this the clock is read too early.
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) / repeats


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


def read_sent():
    """Return the bytes that all machines have sent through the interface of the ranks."""
    name = os.environ.get(f"{dist.get_backend().upper()}_SOCKET_IFNAME", "lo").lstrip("=")
    counters, sent = Path("/proc/net/dev"), 0  # Linux has it. InfiniBand and NVLink pass by it
    for line in counters.read_text().splitlines() if counters.exists() else ():
        if line.strip().startswith(f"{name}:"):
            sent = int(line.partition(":")[2].split()[8])
    # A counter is its machine's, so it counts once, and all programs there are in it.
    return sum(dict(gather((socket.gethostname(), sent))).values())


def listen():
    """Have every all_reduce from now on noted. Return the list of their sizes in bytes."""
    sizes, all_reduce = [], dist.all_reduce

    def noting(tensor, *arguments, **options):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = noting  # the hooks find it here
    return sizes


class Net(nn.Module):
    """A network with 3.3 MB of gradients: images, uint8 [N, 28, 28], to scores, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 1536)
        self.fc2 = nn.Linear(1536, 10)

    def forward(self, images):
        x = (images[:, None] / 255 - 0.1307) / 0.3081  # to mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def train_one_epoch(model, optimizer, batches, accumulate):
    """Train on each batch once. Return [2, steps]: loss summed over the batch; batch size."""
    history = []
    for step, (images, labels) in enumerate(batches, 1):
        send = step % accumulate == 0
        # Around forward too: it is there that DDP decides whether backward will send.
        with contextlib.nullcontext() if send else model.no_sync():
            loss = F.cross_entropy(model(images), labels)
            (loss / accumulate).backward()  # added to what earlier batches have left
        if send:
            optimizer.step()
            optimizer.zero_grad()
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


def train(way, images, labels, args, sizes):
    """Train a new model in one way. Return a row, what a step took, and the loss curve."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulate, options, hook = WAYS[way]
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(images.device)
    if hook:
        model, state = DistributedDataParallel(model, **options), None
        if way == "PowerSGD":
            # What a step leaves out is kept here, as large as the gradients, and added in the next.
            # 2 is the least: DDP forms new buckets after its first step. PyTorch's manual advises
            # a tenth of all steps, because early gradients matter most.
            state = powerSGD_hook.PowerSGDState(None, MATRIX_RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, hook)  # on every rank, before the first backward
    # As in lesson 8, the learning rate grows with the global batch.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * accumulate, momentum=0.9)
    # No image comes twice, so there is nothing to shuffle.
    parts = (x[rank::world_size].split(args.batch_size) for x in (images, labels))
    sizes.clear()
    sent, begin = read_sent(), time.perf_counter()
    history = train_one_epoch(model, optimizer, zip(*parts), accumulate)
    torch.get_device_module(images.device).synchronize()
    dist.barrier()  # wait for the slowest rank
    seconds, sent = time.perf_counter() - begin, read_sent() - sent
    count = history.shape[1]
    row = {"messages": len(sizes) / count, "given": sum(sizes) / count / 1e6}
    row |= {"sent": sent / world_size / count / 1e6, "ms": seconds / count * 1e3}
    dist.all_reduce(history)  # losses and images of all ranks, step by step
    loss, seen = history[:, count * 3 // 4 :].sum(1).tolist()  # of the last quarter
    row |= {"speed": history[1].sum().item() / seconds, "loss": loss / seen}
    return row, torch.div(*F.adaptive_avg_pool1d(history, 20).cpu())  # means: one batch is noisy


def main(device, data, args):
    """Run on every rank: measure a message, train in each way, compare, predict."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    step = args.batch_size * world_size
    count = min(args.max_steps, len(data[0]) // step) * step
    images, labels = data[0][:count].to(device), data[1][:count].to(device)  # the same for all
    numbers = sum(parameter.numel() for parameter in Net().parameters())
    # A message takes alpha, whatever its size, and beta for each MB: a line through two points.
    alpha, whole = (1e3 * max(gather(time_all_reduce(n, device))) for n in (1, numbers))
    beta, sizes, rows, curves = max(0, whole - alpha) / (numbers * 4e-6), listen(), {}, {}
    train("no messages", images, labels, args, sizes)  # a warm-up, not looked at

    def predict(way, ranks=world_size):
        # In a ring of n ranks, 1/n of a message goes on to the next rank 2 (n - 1) times. Source:
        # Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
        hops = (ranks - 1) / max(1, world_size - 1)
        carry = rows[way]["messages"] * alpha + rows[way]["given"] * beta * world_size / ranks
        return rows["no messages"]["ms"] + hops * carry

    if rank == 0:
        print(f"a message takes {alpha:.2f} ms and {beta:.2f} ms for each MB")
        print(HEAD)
    for way in WAYS:
        rows[way], curves[way] = train(way, images, labels, args, sizes)
        if rank == 0:
            print(ROW.format(way, predict(way), **rows[way]))
    if rank > 0:
        return
    write_curves(curves, torch.linspace(0, len(images), 21)[1:])
    plain = rows["plain DDP"]
    # Of those that learn as well, within 2%, the one that sends least.
    well = [x for x in WAYS if rows[x]["given"] and not rows[x]["loss"] > 1.02 * plain["loss"]]
    best = min(well, key=lambda way: rows[way]["given"])
    for n in (8, 64, 1024) if world_size > 1 else ():
        times = (f"{way} {predict(way, n):,.0f} ms" for way in ("plain DDP", best))
        print(f"predicted for a ring of {n} ranks: {', '.join(times)}")
    seen = world_size > 1 and plain["sent"] * world_size > plain["given"] / 2
    kind, note = ("sent", "") if seen else ("given", " (given: the link shows none)")
    share, speed, loss = (rows[best][name] / plain[name] for name in (kind, "speed", "loss"))
    print(f"=> {best}: {share:.2f} of plain DDP's bytes{note}, ", end="")
    print(f"{speed:.1f} times its images/s, loss {loss - 1:+.1%}")


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
    parser.add_argument("--batch-size", type=int, default=32, help="images per process (32)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (0.01)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, default=80, help="in each way (80)")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
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
