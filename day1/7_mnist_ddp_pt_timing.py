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
import socket
import sys
import threading
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
from tqdm import tqdm


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
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = model
    if world_size > 1:
        ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, world_size, dist.get_rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    # The first steps allocate memory, choose kernels and connect the ranks: not timed.
    first_losses = train_one_epoch(ddp_model, progress(loader, 10), optimizer, device)
    sampler.set_epoch(1)  # without this every epoch has the same order
    # A GPU works later than the CPU asks it to. Wait for it, then read the clock.
    torch.get_device_module(device).synchronize()
    begin = time.perf_counter()
    batches = progress(loader, args.max_steps)
    epoch_losses = train_one_epoch(ddp_model, batches, optimizer, device)
    torch.get_device_module(device).synchronize()
    seconds = time.perf_counter() - begin
    losses = mean_over_ranks(torch.cat([first_losses, epoch_losses]), world_size)
    images_seen = min(len(epoch_losses) * global_batch_size, len(train_set))
    return model, losses, images_seen / seconds


def main(device, args):
    """Run on every rank: time each setting in every round, then compare them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_mnist(args.data_dir)
    share = max(1, args.batch_size // world_size)
    batch_size = share * world_size  # so that the ranks can share it
    threads = torch.get_num_threads()
    # Of each setting: ranks, images of each in a step, threads of each.
    settings = {}
    if device.type == "cpu":  # what you would run otherwise
        # First: threads that torch 2.15 adds later are sometimes ten times as slow.
        all_threads = min(threads * world_size, os.cpu_count())
        settings["one process, all cores"] = (1, batch_size, all_threads)
    settings["one process"] = (1, batch_size, threads)
    settings["weak scaling"] = (world_size, batch_size, threads)
    settings["strong scaling"] = (world_size, share, threads)
    results = {name: [] for name in settings}
    no_limit = dist.new_group(timeout=timedelta(days=1))
    for _ in range(args.rounds):  # a machine is not equally fast all the time
        for name, (ranks, images, threads) in settings.items():
            dist.barrier(no_limit)  # here the others wait while rank 0 trains alone
            torch.set_num_threads(threads)
            if rank < ranks:
                results[name].append(train(train_set, ranks, images, device, args))
    if rank == 0:
        model, losses, _ = results["strong scaling"][-1]
        write_scalars(losses, batch_size)
        print(f"test accuracy: {evaluate(model, test_set, device):.2%}")
        return report_timing(settings, results, len(train_set))


# ---- The same in every lesson that has it; explained on the page of the first one

ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def report_timing(settings, results, images):
    """Print the median of each setting's rounds. Print the proof line.

    settings: {name: (ranks, images of each in a step, threads)}; results: {name: what
    train returned in each round}; images: how many an epoch has.
    """
    rounds = len(results["one process"])
    head = "batch global ms/step s/epoch images/s  times one process"
    print(f"{f'median of {rounds} rounds':22} {head}")
    speeds = {name: [speed for *_, speed in rows] for name, rows in results.items()}
    gains = {}
    for name, (ranks, batch_size, _) in settings.items():
        # Divided within each round: if the machine was busy then, it was for both.
        pairs = zip(speeds[name], speeds["one process"], strict=True)
        ratios = [speed / alone for speed, alone in pairs]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        gains[name] = f"{median(ratios):.2f} {spread}"
        speed = median(speeds[name])
        global_batch_size = batch_size * ranks
        sizes = f"{batch_size:5} {global_batch_size:6}"
        times = f"{1000 * global_batch_size / speed:7.1f} {images / speed:7.2f}"
        print(f"{name:22} {sizes} {times} {speed:8,.0f}  {gains[name]}")
    # Strong scaling only divides the work: the losses must be those of one process.
    ranks, share, _ = settings["strong scaling"]
    whole = images // (ranks * share)  # in the last batch the sampler may repeat images
    steps = max(1, min(5, whole))  # later, rounding adds up
    _, losses, _ = results["strong scaling"][0]
    _, expected, _ = results["one process"][0]
    gap = largest_gap(losses, expected, steps)
    gained = f"weak {gains['weak scaling']}, strong {gains['strong scaling']}"
    gaps = f"losses within {gap:.0e} of one process (limit {ROUNDING:.0e})"
    claim = f"{ranks} processes: {gained} times the images/s; {gaps}"
    return prove(claim, gap <= ROUNDING)


def largest_gap(losses, expected, steps):
    """Return the largest difference of two runs in the losses of their first steps."""
    return (losses[:steps] - expected[:steps]).abs().max().item()


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


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


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


def end_with_launcher():
    """End this rank as soon as the launcher has ended, even if by kill -9."""
    mp.parent_process().join()
    os._exit(1)


def start_rank(rank, *arguments):
    """Run as this rank, a number that start_processes gives: set variables, start."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    threading.Thread(target=end_with_launcher, daemon=True).start()
    start(*arguments)


def launch(processes, *arguments):
    """Start the ranks on this machine, with the variables that torchrun would set."""
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        ranks = int(os.environ["WORLD_SIZE"])
        if processes != ranks:
            problem = f"torchrun has started {ranks} processes, not {processes}"
            sys.exit(f"{problem}. Leave the number out.")
        start(*arguments)
        return
    # Reserve a free port. Rank 0 will listen there, and the others connect to it.
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))  # 0: the system chooses one
        address, port = keeper.getsockname()
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        # Divide the cores: ranks that each want all of them slow each other down.
        threads = max(1, torch.get_num_threads() // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # Ctrl-C ends every rank, with no traceback, unless the shell has it ignored.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":  # import once, not once per rank; not safe on a Mac
            mp.set_forkserver_preload(["torch", "torch._dynamo", "torchvision"])
        try:
            mp.start_processes(
                start_rank, arguments, processes, start_method="forkserver"
            )
        except mp.ProcessExitedException as error:
            sys.exit(str(error))  # a rank was killed, or has said what is wrong itself


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
    ranks = int(os.environ.get("WORLD_SIZE", 4))  # torchrun sets it
    add("processes", nargs="?", type=positive_int, default=ranks, help="how many (4)")
    add("--rounds", type=positive_int, default=5, help="how often to time each (5)")
    add("--batch-size", type=positive_int, default=256, help="of one process (256)")
    add("--lr", type=positive_float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, default=30, help="to time in a round (30)")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes, args)
