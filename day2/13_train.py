"""Lesson 13: the file you take home. One training script for every machine.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  resuming, bf16, accumulation, clipping, exact tests, --shard
Run:       scripts/multinode_setup_and_run.sh day2/13_train.py
Look for:  => 10,000 of 10,000 tested, model.safetensors has 8 of 8 tensors equal: ok
Try next:  kill -9 a rank, then the same command; scripts/compare_losses.py RUN RUN
"""

# The functions that begin with "Yours" are to be changed. The rest then still holds:
# one seed gives one training, interrupted or not, on one process or many, except for
# rounding, dropout (it differs on each rank) and BatchNorm (it sees part of a batch).

import argparse
import fcntl
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
import zlib
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models
from torchvision.transforms import v2


def build_data(args):
    """Yours: the data for training and for testing."""
    to_tensor = [v2.Grayscale(3), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    to_tensor.append(v2.Normalize([0.5] * 3, [0.25] * 3))
    transform = v2.Compose(to_tensor)
    if args.data == "random":  # nothing to learn: for a first try, and to measure speed
        images = datasets.FakeData(2_000, (3, 64, 64), 10, transform)
        return images, Subset(images, range(500))
    folder = Path(args.data).resolve(strict=True)
    train_set = datasets.MNIST(folder, train=True, transform=transform)
    return train_set, datasets.MNIST(folder, train=False, transform=transform)


def collate(samples):
    """Yours: a batch of samples. If they differ in length, pad them here."""
    return default_collate(samples)


def build_model(args, train_set):
    """Yours: the model, and its parts, which --shard gathers one after the other."""
    if args.model == "resnet18":
        model = models.resnet18(num_classes=10)
        return model, [model.layer1, model.layer2, model.layer3, model.layer4]
    first = nn.Sequential(nn.Conv2d(3, 16, kernel_size=5, stride=2), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 32, kernel_size=5, stride=2), nn.ReLU())
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    third = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU())
    model = nn.Sequential(first, second, flat, third, nn.Linear(64, 10))
    return model, [first, second, third]


def build_optimizer(model, args):
    """Yours: the optimizer."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, args.lr, momentum=0.9)


def compute(model, batch, device):
    """Yours: losses [batch, ...], their weights (padding: 0), and metrics by name."""
    images, labels = [x.to(device, non_blocking=True) for x in batch]
    outputs = model(images)
    losses = F.cross_entropy(outputs, labels, reduction="none")  # not their mean
    right = (outputs.argmax(dim=1) == labels).float()
    return losses, torch.ones_like(losses), {"accuracy": right}


def schedule(step, steps, args):
    """Yours: which part of --lr a step takes. Here: warm-up, then half a cosine."""
    warm_up = min(1, (step + 1) / 20)
    return warm_up * (1 + math.cos(math.pi * step / steps)) / 2


def log(trainer, step, values, title=""):
    """Yours: log values on rank 0, as wandb.log does. With a title, print them, too."""
    if trainer.rank == 0:
        for name, value in values.items():
            trainer.board.add_scalar(name, value, step)
        if title:
            trainer.board.flush()
            show(", ".join([title, *(f"{name} {x:.4g}" for name, x in values.items())]))


class Trainer:
    """A training: what it consists of, its steps and tests, its log and checkpoints."""

    def __init__(self, device, args):
        self.device = device
        self.args = args
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        timeout = timedelta(seconds=args.timeout)
        self.cpu_group = dist.new_group(backend="gloo", timeout=timeout)
        # For what waits for a disk, which takes as long as it takes.
        self.disk_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        seed_all(args.seed)  # for a random split: the same on every rank
        train_set, test_set = build_data(args)
        self.sets = {"train": train_set, "test": test_set}
        # What no resume may change, line by line. The rate and others may.
        kept = ["model", "seed", "global_batch_size", "max_steps"]
        self.lines = [f"{name}: {getattr(args, name)}" for name in kept]
        self.lines += [self.describe(name) for name in self.sets]
        self.epoch_steps = min(len(train_set) // args.global_batch_size, args.max_steps)
        if self.epoch_steps == 0:
            raise Problem(f"{len(train_set)} samples are less than a global batch")
        self.steps = args.epochs * self.epoch_steps
        self.step = 0  # of the whole training
        self.losses = []  # of the steps that are not in the log yet
        self.best = math.inf  # the lowest loss of a test
        seed_all(args.seed)  # the same first weights on every rank
        self.model, parts = build_model(args, train_set)
        self.lines += re.sub(" at 0x[0-9a-f]+", "", str(self.model)).splitlines()
        for name, x in self.model.named_parameters():
            kind = f"{[*x.shape]}, {x.dtype}, trains: {x.requires_grad}"
            self.lines.append(f"{name}: {kind}")
        self.wrapped = wrap(self.model, parts, device, args)
        self.optimizer = build_optimizer(self.model, args)
        if isinstance(self.optimizer, torch.optim.SparseAdam):
            raise Problem("SparseAdam cannot resume: take SGD without momentum")
        self.lines.append(f"optimizer: {type(self.optimizer).__name__}")
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        rounded = args.precision == "bf16"  # what is multiplied; weights stay fp32
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=rounded)

    def train_step(self, batches):
        """Take one step, with the next batches."""
        sums = torch.zeros(2, device=self.device)
        for number in range(1, self.args.accumulate + 1):
            batch = next(batches)
            # For dropout: different on each rank, and the same again after a restart.
            seed_all(self.args.seed, self.step, number, self.rank)
            # DDP averages in the backward of the last batch only. Shards are averaged
            # each time: no rank has the memory for whole gradients.
            average = self.args.shard or number == self.args.accumulate
            with nullcontext() if average else self.wrapped.no_sync():
                with self.autocast:
                    losses, weights, _ = compute(self.wrapped, batch, self.device)
                loss = (losses * weights).sum()
                loss.backward()  # gradients add up
            sums += torch.stack([loss.detach(), weights.sum()])  # no .item(): it waits
        # The gradients are sums over samples, which DDP divides by the number of ranks.
        # This makes them means: each sample of the global batch counts the same.
        dist.all_reduce(sums)
        loss, weight = sums
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, self.ranks / weight)
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        factor = schedule(self.step, self.steps, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss / weight)
        self.step += 1

    def train_epoch(self):
        """Train to the epoch's end or until a signal; save. Return whether one came."""
        batches = self.read(self.train_keys())
        self.wrapped.train()
        self.begin = time.perf_counter()
        while True:
            # What one rank is told, all do. They ask while they compute, so none waits.
            stop = torch.tensor(len(SIGNALED))
            asked = dist.all_reduce(stop, group=self.cpu_group, async_op=True)
            self.train_step(batches)
            asked.wait()
            end = stop or self.step % self.epoch_steps == 0
            save = end or self.step % self.args.save_every == 0
            if save or self.step % self.args.log_every == 0:
                self.log_steps()
            if save:
                self.save()
                self.begin = time.perf_counter()  # saving is no training
            if end:
                return stop > 0

    def train_keys(self):
        """Yield the keys of this rank's batches in the rest of an epoch."""
        # All ranks make the same shuffled order, and each step takes its next global
        # batch: the same samples on any number of ranks, and after a restart.
        epoch, done = divmod(self.step, self.epoch_steps)
        generator = torch.Generator().manual_seed(hash((self.args.seed, epoch)))
        count = len(self.sets["train"])
        order = torch.randperm(count, generator=generator, dtype=torch.int32)
        size = self.args.global_batch_size
        order = order[done * size : self.epoch_steps * size].view(-1, size)
        order = order[:, self.rank :: self.ranks].clone()  # keep this rank's part only
        for share in order:
            for batch in share.tensor_split(self.args.accumulate):
                yield [("train", epoch, index) for index in batch.tolist()]

    def log_steps(self):
        """Log the steps since the last line. Stop at a loss that is no number."""
        losses = torch.stack(self.losses).tolist()  # waits for the device
        self.losses = []
        norm = self.norm.full_tensor() if self.args.shard else self.norm
        ends = torch.stack([norm, -norm])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends.sum() > 1e-3 * norm:  # the longest less the shortest
            what = "compute must call model(...), not its methods or its .module"
            raise Problem(f"ranks have different gradients: {what}")
        speed = len(losses) / (time.perf_counter() - self.begin)
        first = self.step - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            log(self, step, {"loss": loss})
        values = {"gradient": norm.item(), "rate": self.optimizer.param_groups[0]["lr"]}
        values["samples/s"] = speed * self.args.global_batch_size
        title = f"step {self.step:,} of {self.steps:,}, loss {losses[-1]:.4g}"
        log(self, self.step, values, title)
        if not all(map(math.isfinite, [*losses, norm])):
            raise Problem(f"a loss or gradient was no number in steps {first} and on")
        self.begin = time.perf_counter()

    @torch.no_grad()
    def evaluate(self):
        """Test on all ranks, each sample once. Return how many were tested."""
        self.model.eval()  # no dropout; BatchNorm takes the averages that it has kept
        # With --shard ranks compute together, so all need the same number of batches.
        count = len(self.sets["test"])
        end = math.ceil(count / self.ranks) * self.ranks
        parts = torch.arange(self.rank, end, self.ranks).split(self.args.batch_size)
        keys = ([("test", 0, i % count) for i in part.tolist()] for part in parts)
        totals = 0
        for part, batch in zip(parts, self.read(keys), strict=True):
            seed_all(self.args.seed, part[0].item())
            with self.autocast:
                losses, weights, metrics = compute(self.model, batch, self.device)
            values = {"test loss": losses, **metrics}
            shapes = [[*x.shape] for x in (weights, *values.values())]
            if any(shape != shapes[0] or shape[:1] != [len(part)] for shape in shapes):
                what = "weights, losses, metrics have shapes"
                raise Problem(f"{what} {shapes}, for {len(part)} samples")
            # What is beyond the end only makes the ranks even.
            real = (part < count).to(self.device)
            weights = (weights.float().movedim(0, -1) * real).movedim(-1, 0)
            sums = [(x * weights).sum() for x in values.values()]
            sums = torch.stack([*sums, weights.sum(), real.sum()])
            totals += sums.cpu().double()  # float32 cannot count beyond 16 million
        dist.all_reduce(totals, group=self.cpu_group)  # sums: the parts may differ
        *sums, weight, tested = totals.tolist()
        means = {name: total / weight for name, total in zip(values, sums, strict=True)}
        log(self, self.step, means, f"test of {tested:,.0f}")
        if self.step % self.epoch_steps == 0 and means["test loss"] < self.best:
            self.best = means["test loss"]
            self.export("best.safetensors")
        return tested

    def save(self):
        """Write checkpoint step-N, each rank a part. Every rank must call this."""
        for buffer in self.model.buffers():  # the averages that BatchNorm has kept
            dist.broadcast(buffer, src=0)
        folder = self.args.checkpoint_dir / f"step-{self.step:08}"
        new = folder.with_suffix(".tmp")
        dcp.save(self.state(), checkpoint_id=new, process_group=self.disk_group)
        if self.rank == 0:
            (new / "training.txt").write_text("\n".join(self.lines))
            (new / "checksums.json").write_text(json.dumps(checksums(new)))
            shutil.rmtree(folder, ignore_errors=True)  # one that could not be read
            new.rename(folder)  # only now it counts
            older = sorted(folder.parent.glob("step-*[0-9]"))
            for path in older[: max(0, older.index(folder) - 1)]:  # keep two
                shutil.rmtree(path, ignore_errors=True)
        dist.barrier(group=self.disk_group)
        show(f"saved: {folder}")

    def resume(self):
        """Resume from the newest checkpoint that can be read. All ranks call this."""
        folder = self.args.checkpoint_dir
        found = [self.lines, None]
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:  # the lock holds for as long as this process lives
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                what = "does another job train there?"
                raise Problem(f"cannot lock {folder}: {error}: {what}") from None
            there = sorted(folder.glob("step-*[0-9]"), reverse=True)
            for path in there:
                damaged = {"checksums.json"}
                with suppress(OSError, ValueError):
                    written = json.loads((path / "checksums.json").read_bytes())
                    changes = written.items() ^ checksums(path).items()
                    damaged = {name for name, _ in changes}
                if not damaged:
                    found = [(path / "training.txt").read_text().split("\n"), path]
                    break
                show(f"{path} cannot be read: damaged {sorted(damaged)}")
            if there and not found[1]:
                raise Problem(f"no checkpoint in {folder} can be read")
            for unfinished in folder.glob("step-*.tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
        dist.broadcast_object_list(found, group=self.disk_group)  # as rank 0 has found
        lines, path = found
        if not (folder / "lock").exists():
            raise Problem(f"rank {self.rank} cannot see rank 0's files in {folder}")
        for line, own in zip_longest(lines, self.lines):
            if line != own:
                where = f"{path or 'rank 0'} has {line!r}, rank {self.rank} has {own!r}"
                what = "make them equal, or name a new --checkpoint-dir"
                raise Problem(f"this is another training: {where}: {what}")
        if path:
            state = self.state()
            dcp.load(state, checkpoint_id=path, process_group=self.disk_group)
            dcp_state.set_model_state_dict(self.model, state["model"])
            optimizer = dcp_state.get_optimizer_state_dict(self.model, self.optimizer)
            optimizer["state"] = state["optimizer"]  # its rates and decay are new
            dcp_state.set_optimizer_state_dict(self.model, self.optimizer, optimizer)
            self.best = state["best"]
            self.step = state["step"]
            show(f"resumed: {path}")
        if self.rank == 0:
            self.board = SummaryWriter(folder, purge_step=self.step + 1)

    def state(self):
        """Return what a checkpoint holds. With --shard, tensors are in parts."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        numbers = {"best": self.best, "step": self.step}
        return {"model": model, "optimizer": optimizer["state"], **numbers}

    def export(self, name):
        """Write the weights. Return for each whether the file has the same bits."""
        whole = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = dcp_state.get_model_state_dict(self.model, options=whole)
        equal = []
        if self.rank == 0:
            new = self.args.checkpoint_dir / "export.tmp"
            copies = {key: x.contiguous().clone() for key, x in weights.items()}
            save_file(copies, new, metadata={"format": "pt"})
            written = load_file(new)
            equal = [torch.equal(written[key], x) for key, x in weights.items()]
            new.replace(new.with_name(name))
        dist.barrier(group=self.disk_group)
        return equal

    def read(self, keys):
        """Return an iterator over batches. Keys of samples are (set, epoch, index)."""
        loader = DataLoader(
            Seeded(self.sets, self.args.seed),
            batch_sampler=keys,
            collate_fn=collate,
            num_workers=self.args.workers,
            timeout=self.args.timeout if self.args.workers else 0,
            pin_memory=self.device.type == "cuda",  # copied while the GPU computes
        )
        # Workers inherit this: told to stop with their rank, they read on until it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        time.sleep(0.01)  # before Python 3.12 a fork hangs if gloo drops a tensor
        batches = iter(loader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return batches

    def describe(self, name):
        """Return how long a data set is, and a checksum of ten samples."""
        count = len(self.sets[name])
        keys = [(name, 0, i) for i in range(0, count, count // 10 + 1)]
        # Read by workers: a file that the rank opened now would be shared by them all.
        sums = [checksum(batch) for batch in self.read([keys, keys])]
        if sums[0] != sums[1]:  # although the seed was the same
            what = "one index gives two samples: draw random numbers from torch, numpy"
            raise Problem(f"{name}: {what} or random, and read nothing in turn")
        return f"{name}: {count:,} samples with checksum {sums[0]:08x}"


class Seeded(Dataset):
    """Data sets whose random changes depend on seed, epoch and sample, and no more."""

    def __init__(self, sets, seed):
        self.sets = sets
        self.seed = seed

    def __getitem__(self, key):
        name, epoch, index = key
        cpu = torch.default_generator  # to seed all devices' would take 0.2 ms a sample
        seed_all(self.seed, epoch, index, seed_torch=cpu.manual_seed)
        try:
            return self.sets[name][index]
        except Exception as error:  # of any type: a broken picture, or one too large
            what = f"{name} sample {index} cannot be read: {error!r}"
            raise RuntimeError(what) from error  # its traceback has the line


def wrap(model, parts, device, args):
    """Return the model as it is trained, on its device: with DDP, or in shards."""
    if not args.shard:
        wrapped = DistributedDataParallel(model.to(device))
        # DDP regroups its messages after the first backward, and from then on it rounds
        # sums of three ranks differently. Do it now, so every start rounds the same.
        if not any(getattr(module, "sparse", False) for module in model.modules()):
            forward = model.forward
            model.forward = lambda: sum(p.real.sum() for p in model.parameters())
            wrapped().backward()
            model.forward = forward
            model.zero_grad()
        return wrapped
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for part in [*parts, model]:  # each is gathered, used and freed by itself
        fully_shard(part, mesh=mesh)
        part.set_force_sum_reduction_for_comms(True)  # not all backends average
    return model


def main(args):
    """Run as one rank: resume, then train, save and test. Return the exit status."""
    warnings.filterwarnings("ignore", "TypedStorage")  # torch 2.6 about itself
    device, backend = own_device()
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    options = {"device_id": None if backend == "gloo" else device}  # NCCL connects now
    if "MASTER_ADDR" not in os.environ:  # one process needs no port
        options |= {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), **options)
    show(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    trainer = Trainer(device, args)
    trainer.resume()
    tested = trainer.evaluate()  # if this fails, you know it before you train
    while trainer.step < trainer.steps:
        if trainer.train_epoch():
            show("Stopped as told. The same command resumes from here.")
            return 0 if "TORCHELASTIC_RUN_ID" in os.environ else os.EX_TEMPFAIL
        tested = trainer.evaluate()
    equal = trainer.export("model.safetensors")
    count = len(trainer.sets["test"])
    holds = tested == count and all(equal)
    claim = f"{tested:,.0f} of {count:,} tested, model.safetensors has "
    claim += f"{sum(equal)} of {len(equal)} tensors equal"
    show(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


# ---- Shared helpers, identical in every lesson

# Slurm, torchrun, Ctrl-C, a closed terminal: save, the end is near.
SIGNALS = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored
    SIGNALS.append(signal.SIGHUP)
SIGNALED = []


class Problem(Exception):
    """Stops the training with an error message instead of a traceback."""


def seed_all(*numbers, seed_torch=torch.manual_seed):
    """Seed torch, numpy and random with what these numbers make."""
    seed = hash(numbers) % 2**63
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def checksum(batch):
    """Return a number for all bits of a batch."""
    number = 0
    for x in tree_leaves(batch):
        if torch.is_tensor(x):
            x = x.detach().to_dense().resolve_conj().flatten().view(torch.uint8)
            x = x.numpy().tobytes()
        number = zlib.crc32(pickle.dumps(x), number)
    return number


def checksums(folder):
    """Return a number for the bits of each file in a checkpoint."""
    files = [file for file in folder.iterdir() if file.name != "checksums.json"]
    files = [file for file in files if file.stat().st_size > 0]
    return {file.name: zlib.crc32(np.memmap(file, mode="r")) for file in files}


def show(line):
    """Print a line, on rank 0."""
    if dist.get_rank() == 0:
        with suppress(OSError):  # the terminal may be closed
            print(line, flush=True)


def own_device():
    """Return this rank's device, and the backend that connects such devices."""
    torch.set_num_threads(1)  # more would spin while they wait: slow on busy cores
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    # Where each rank sees its own GPU only, the launcher or Slurm knows the node's.
    gpus_here = os.environ.get("SLURM_GPUS_ON_NODE", gpus)
    gpus_here = int(os.environ.get("GPUS_ON_NODE", gpus_here))
    too_few = gpus_here < int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if kind in ("cpu", "mps") or too_few:
        return torch.device("cpu"), "gloo"  # gloo cannot use Apple's mps
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % gpus)
    torch.accelerator.set_device_index(device.index)
    return device, dist.get_default_backend_for_device(device)


def name_rank():
    """Set torchrun's variables: srun has started this rank, or it is the only one."""
    given = os.environ
    ranks = given.get("SLURM_STEP_NUM_TASKS", "1")
    if ranks == "1" or sys.stdin.isatty():  # python, typed in a shell of srun --pty
        given.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WORLD_SIZE="1")
        return
    given.update(RANK=given["SLURM_PROCID"], LOCAL_RANK=given["SLURM_LOCALID"])
    most = math.ceil(int(ranks) / int(given["SLURM_STEP_NUM_NODES"]))
    given.update(LOCAL_WORLD_SIZE=str(most), WORLD_SIZE=ranks)
    # Of n[4-7,9],m2 the first is n4.
    nodes = re.sub(r"\[(\w+)[^]]*]", r"\1", given["SLURM_STEP_NODELIST"])
    port = 20_000 + (int(given["SLURM_JOB_ID"]) + int(given["SLURM_STEP_ID"])) % 10_000
    given.update(MASTER_ADDR=nodes.split(",")[0], MASTER_PORT=str(port))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE", os.cpu_count()))
    spare = max(0, min(8, cores // ranks_here - 1))
    folder = os.environ.get("CHECKPOINT_DIR", f"runs/{Path(__file__).stem}")
    wait = os.environ.get("DIST_TIMEOUT", 300)
    data = Path(__file__).resolve().parent.parent / "data"
    add("epochs", nargs="?", type=int, default=1, help="in total (1)")
    add("--data", default=data, help="random, or where yours is (MNIST)")
    add("--model", choices=["net", "resnet18"], default="net", help="(net)")
    add("--checkpoint-dir", type=Path, default=folder, help=f"({folder})")
    add("--save-every", type=int, default=1000, help="steps, and each epoch (1000)")
    add("--global-batch-size", type=int, default=256, help="of all ranks (256)")
    add("--batch-size", type=int, default=64, help="of a rank at once, at most (64)")
    add("--lr", type=float, default=0.05, help="highest learning rate (0.05)")
    add("--clip", type=float, default=1.0, help="longest gradient, or inf (1.0)")
    add("--seed", type=int, default=0, help="for weights, order, augmentation (0)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="(fp32)")
    add("--shard", action="store_true", help="FSDP2 instead of DDP")
    add("--workers", type=int, default=spare, help=f"that read data ({spare})")
    add("--log-every", type=int, default=50, help="steps (50)")
    add("--max-steps", type=int, default=10**9, help="of each epoch (all)")
    add("--timeout", type=int, default=wait, help="seconds to wait for a rank (300)")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name in ("workers", "seed") else 1e-9
        most = math.inf if name == "clip" else 2**31 - 1
        if type(number) in (int, float) and not least <= number <= most:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    ranks = int(os.environ["WORLD_SIZE"])
    most = math.ceil(args.global_batch_size / ranks)  # samples of a rank in a step
    args.accumulate = math.ceil(most / args.batch_size)
    if args.global_batch_size < ranks * args.accumulate:
        parser.error(f"{args.global_batch_size} samples are too few for {ranks} ranks")
    if args.shard and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        parser.error("--shard needs torch 2.8")
    return args


if __name__ == "__main__":
    for each in SIGNALS:
        signal.signal(each, lambda number, frame: SIGNALED.append(number))
    if "RANK" not in os.environ:
        name_rank()
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])  # Kubernetes gives none
    status = 1
    try:
        status = main(parse_args())
        sys.stdout.flush()
        dist.barrier()  # leave together; if a rank fails before, the job ends there
    except Exception as error:  # on this rank alone, or on all of them
        if os.environ["RANK"] != "0" or "by peer" in str(error):
            time.sleep(3)  # the rank with the cause says it first, and ends the job
        if isinstance(error, (Problem, OSError, dcp.CheckpointException)):
            print(str(error).strip().rpartition("\n")[2], file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
    # Python would wait for data workers, perhaps for ever.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's would raise an error
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)
