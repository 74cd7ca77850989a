"""Lesson 8: more ranks make a larger global batch, and that wants a larger learning rate.

Builds on: 6_mnist_ddp_pt.py
New here:  global batch, linear scaling rule, warm-up (Goyal et al., 2017, arXiv:1706.02677)
Run:       python day1/8_mnist_ddp_pt_lr.py [processes]
Look for:  => gap to the loss curve of one process: 152% unscaled, 23% linear
Try next:  --scaling sqrt; --lr 0.015, three times as large; 8 processes.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
    parser.add_argument("--batch-size", type=int, default=64, help="images per process (64)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate (0.005)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, help="end after this many steps of all ranks")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--scaling", choices=["linear", "sqrt"], default="linear")
    parser.add_argument("--warm-up", type=int, default=12, help="steps of it (12)")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes, load_mnist(args.data_dir), args)  # the ranks share the data's memory
