"""Lesson 12: a job that resumes where it was, after a failure or a time limit.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  snapshot, a sampler that starts in the middle, a signal before the end
Run:       scripts/multinode_setup_and_run.sh --max-restarts 3 \
day2/12_mnist_ddp_torchrun_elastic.py
Look for:  => starts: ..., images once an epoch: ... (limit ...), parameters ...: ok
Try next:  --crash-at-step 100; kill -9 a rank; kill -TERM one, then the same command.
"""

import argparse
import math
import os
import pickle
import signal
import sys
import time
import zipfile
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST


class Job:
    """A training, and everything that it takes to resume it from a snapshot."""

    def __init__(self, model, optimizer, args):
        self.model = model
        self.optimizer = optimizer
        self.epoch = 0
        self.seen = 0  # images of this epoch that all ranks together have used
        self.step = 0
        self.ranks = [dist.get_world_size()]  # of each start
        self.visits = torch.zeros(args.images, dtype=torch.int64)  # of each image
        self.arguments = [args.images, args.batch_size, args.lr, args.seed]
        self.stop_requested = False
        signal.signal(signal.SIGUSR1, self.request_stop)  # a time limit is near
        signal.signal(signal.SIGTERM, self.request_stop)

    def request_stop(self, number, frame):
        """Note a signal. It may come in the middle of a step."""
        self.stop_requested = True

    def state_dict(self):
        """Return what the next step depends on, and what the proof needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),  # the momentum
            "progress": (self.epoch, self.seen, self.step),
            "proof": (self.ranks, self.visits),
            "arguments": self.arguments,
        }

    def load_state_dict(self, state):
        """Resume from a snapshot, perhaps with a different number of ranks."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.seen, self.step = state["progress"]
        self.ranks, self.visits = state["proof"]
        self.ranks.append(dist.get_world_size())


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can start in the middle of an epoch."""

    def set_epoch(self, epoch, seen):
        """Choose this rank's images of an epoch of which so many are used already."""
        # All ranks make the same shuffled list. Of what is left each takes every
        # num_replicas-th image (there are so many ranks), all the same number.
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        self.num_samples = (len(order) - seen) // self.num_replicas
        left = order[seen + self.rank :: self.num_replicas]
        self.indices = left[: self.num_samples].tolist()

    def __iter__(self):
        return iter(self.indices)


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


def train(train_set, device, args, snapshots):
    """Train on all ranks, to the end or until a signal. Return the job."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model copies rank 0's parameters to all: the seed only makes runs comparable.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model, whose parameters it shares, is on this rank's device.
    ddp_model = DistributedDataParallel(model)
    settle(ddp_model, device)  # so that every start adds up in the same order
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = ResumableSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    job = Job(model, optimizer, args)
    if snapshots:
        resume(job)  # from the newest one, if there is any
    share = args.save_every * args.batch_size  # images of a rank between two snapshots
    while job.epoch < args.epochs:
        sampler.set_epoch(job.epoch, job.seen)
        batches = iter(loader)
        for first in range(0, len(sampler), share):
            some = islice(batches, args.save_every)  # up to the next snapshot
            losses = train_one_epoch(ddp_model, some, optimizer, device)
            used = torch.tensor(gather(sampler.indices[first : first + share]))
            job.visits += used.flatten().bincount(minlength=args.images)
            job.seen += used.numel()
            job.step += len(losses)
            if snapshots:
                save_snapshot(job, losses, args)
                # The signal may reach the ranks at different steps: stop together.
                if any(gather(job.stop_requested)):
                    return job
        job.epoch += 1
        job.seen = 0
    return job


def main(device, args):
    """Run on every rank: train with snapshots, then again without. Compare."""
    make_repeatable()  # only because we compare runs
    train_set = TensorDataset(*load_mnist()[0][: args.images])
    job = train(train_set, device, args, snapshots=True)
    if job.epoch < args.epochs:
        if dist.get_rank() == 0:
            print("Stopped as told. The same command resumes from here.")
        return
    without_stop = train(train_set, device, args, snapshots=False)
    status = finish(job, without_stop) if dist.get_rank() == 0 else None
    return gather(status)[0]  # on all ranks: each node's torchrun must see the same end


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"
SNAPSHOT = Path(FOLDER, "snapshot.pt")


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def finish(job, without_stop):
    """Save the model, print the proof. If it does not hold, keep the snapshots.

    torchrun then starts the job again, and it must not train again, without a stop.
    """
    save(job.model.state_dict(), Path(FOLDER, "model.pt"))
    once = (job.visits == job.epoch).sum().item()
    # Each epoch may leave out images, but fewer than there are ranks.
    limit = len(job.visits) - job.epoch * (max(job.ranks) - 1)
    visits = f"images once an epoch: {once:,} of {len(job.visits):,} (limit {limit:,})"
    pairs = zip(job.model.parameters(), without_stop.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    parameters = "as without a stop" if same else "DIFFERENT"
    if len(set(job.ranks)) > 1:  # then the steps differ
        parameters = f"not compared ({', '.join(map(str, job.ranks))} ranks)"
    holds = once >= limit and parameters != "DIFFERENT"
    if holds:
        for file in Path(FOLDER).glob("snapshot.*"):
            file.unlink()
    return prove(f"starts: {len(job.ranks)}, {visits}, parameters {parameters}", holds)


def settle(ddp_model, device):
    """Have DDP settle in which order it adds gradients up: in its second backward."""
    images = torch.zeros(1, 28, 28, dtype=torch.uint8, device=device)
    for _ in range(2):
        ddp_model(images).sum().backward()


def save_snapshot(job, losses, args):
    """Have rank 0 write a snapshot, if the losses are finite. All ranks call this."""
    rank = dist.get_rank()
    first_start = len(job.ranks) == 1 and SNAPSHOT.exists()
    if rank == 0 and first_start and job.step >= args.crash_at_step:
        raise RuntimeError(f"rank 0 fails after step {job.step}, as told")
    dist.all_reduce(losses)  # each rank knows only its own
    loss = losses.mean().item() / dist.get_world_size()
    if not math.isfinite(loss):  # the same on all ranks
        sys.exit(1 if rank else "The loss is not finite. Take a smaller --lr.")
    if rank == 0:
        save(job.state_dict(), SNAPSHOT)
        where = f"in epoch {job.epoch} after {job.seen:,} images"
        print(f"step {job.step}: snapshot {where}, loss {loss:.4f}")


def save(state, path):
    """Write a file and keep the one before. So a complete one always exists."""
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(state, temporary)
    except (OSError, RuntimeError):  # torch calls a full disk a RuntimeError
        temporary.unlink()
        sys.exit(f"{temporary} could not be written. Is the disk full?")
    if path.exists():
        path.replace(path.with_suffix(".before"))
    temporary.replace(path)  # so this name never has half a file


def resume(job):
    """Resume from the newest whole snapshot, if any. Every rank must call this."""
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    state = load(SNAPSHOT)  # each rank reads it itself
    if state:
        job.load_state_dict(state)
    rank = dist.get_rank()
    if len(set(gather(job.step))) > 1:
        sys.exit(1 if rank else f"The ranks read different snapshots in {FOLDER}.")
    if state and state["arguments"] != job.arguments:
        problem = f"{SNAPSHOT} is from a job with different arguments."
        sys.exit(1 if rank else f"{problem} Use those, or rename {FOLDER}.")
    if state and rank == 0:
        where = f"in epoch {job.epoch} after {job.seen:,} images"
        print(f"start {len(job.ranks)}: resumes {where}")


def load(path):
    """Return the newest snapshot that is whole, or None where there is none."""
    for file in (path, path.with_suffix(".before")):
        try:
            # torch.load does not notice a wrong bit. The checksums of the file do.
            problem = zipfile.ZipFile(file).testzip()
            if problem is None:
                # weights_only: runs no code that someone has put into the file
                return torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            continue
        except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError) as error:
            problem = str(error).partition("\n")[0]
        if dist.get_rank() == 0:
            print(f"{file} cannot be used: {problem}")
    return None


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
    add("--epochs", type=int, default=1, help="epochs (1)")
    add("--batch-size", type=int, default=64, help="per process (64)")
    add("--lr", type=float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--images", type=int, default=30_000, help="training images (30000)")
    add("--save-every", type=int, default=50, help="steps per snapshot (50)")
    add("--crash-at-step", type=int, default=2**31 - 1, help="a rank fails (never)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    if not int(os.environ["WORLD_SIZE"]) <= args.images <= 60_000:
        parser.error("images must be as many as ranks at least, and at most 60000")
    return args


if __name__ == "__main__":
    run = record(start)  # torchrun then knows which rank failed first, and why
    sys.exit(run(parse_args()))
