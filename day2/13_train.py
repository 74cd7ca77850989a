"""Lesson 13: the file you take home. One training script for every machine.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  resuming, bf16, accumulation, clipping, exact tests, --shard
Run:       scripts/multinode_setup_and_run.sh day2/13_train.py
Look for:  => 10,000 of 10,000 tested, ...; model.safetensors has ... equal: ok
Try next:  kill -9 a rank, then the same command; scripts/compare_losses.py RUN RUN
"""

# Started by python, torchrun, srun or sbatch: 13_train.py [EPOCHS]. The functions that
# begin with "Yours" are to be changed. The rest then still holds: one seed gives one
# training, interrupted or not, on one process or on many, except for rounding, dropout
# (it differs on each rank) and BatchNorm (each rank sees a part of a batch).

import argparse
import fcntl
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
import zlib
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models
from torchvision.transforms import v2


def build_data(args):
    """Yours: the data for training and for testing."""
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    to_tensor.append(v2.Normalize([0.5] * 3, [0.25] * 3))
    if args.data == "random":  # nothing to learn: for a first try, and to measure speed
        images = datasets.FakeData(2_000, (3, 64, 64), 10, v2.Compose(to_tensor))
        return images, Subset(images, range(500))
    if args.data == "mnist":
        folder = Path(__file__).resolve().parent.parent / "data"
        if not folder.is_dir():
            raise Problem(f"there is no {folder} with MNIST: name your --data")
        transform = v2.Compose([v2.Grayscale(3), *to_tensor])
        train_set = datasets.MNIST(folder, train=True, transform=transform)
        return train_set, datasets.MNIST(folder, train=False, transform=transform)
    augment = [v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), *to_tensor]
    plain = [v2.Resize(72), v2.CenterCrop(64), *to_tensor]
    test = "val" if Path(args.data, "val").is_dir() else "test"
    train_set = datasets.ImageFolder(f"{args.data}/train", v2.Compose(augment))
    test_set = datasets.ImageFolder(f"{args.data}/{test}", v2.Compose(plain))
    if train_set.classes != test_set.classes:
        raise Problem(f"train and {test} of {args.data} have different classes")
    return train_set, test_set


def collate(samples):
    """Yours: a batch of samples. If they differ in length, pad them here."""
    return default_collate(samples)


def build_model(args, train_set):
    """Yours: the model, and its parts, which --shard gathers one after the other."""
    classes = 10 if args.data in ("mnist", "random") else len(train_set.classes)
    if args.model == "resnet18":
        model = models.resnet18(num_classes=classes)
        return model, [model.layer1, model.layer2, model.layer3, model.layer4]
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, kernel_size=5, stride=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, kernel_size=5, stride=2), nn.ReLU()),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU()),
        nn.Linear(64, classes),
    )
    return model, [model[0], model[1], model[4]]


def build_optimizer(model, args):
    """Yours: the optimizer. Biases and norms, of one dimension, do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": args.decay}]
    groups.append({"params": rest, "weight_decay": 0.0})  # AdamW's own is not 0
    fused = parameters[0].device.type == "cuda"  # one kernel instead of many
    return torch.optim.SGD(groups, args.lr, momentum=0.9, fused=fused)


def compute(model, batch, device):
    """Yours: of each sample or token the loss, the weight, and metrics by name."""
    images, labels = batch
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    if device.type == "cuda":
        images = images.contiguous(memory_format=torch.channels_last)  # tensor cores
    outputs = model(images)
    losses = F.cross_entropy(outputs, labels, reduction="none")  # not their mean
    right = (outputs.argmax(dim=1) == labels).float()
    return losses, torch.ones_like(losses), {"accuracy": right}  # 0 for padding


def schedule(step, steps, args):
    """Yours: which part of --lr a step takes. Here: warm-up, then half a cosine."""
    warm_up = min(1, (step + 1) / args.warm_up)
    return warm_up * (1 + math.cos(math.pi * step / steps)) / 2


def log(trainer, step, values, title=""):
    """Yours: log values on rank 0, as wandb.log does. With a title, print them, too."""
    if trainer.rank == 0:
        for name, value in values.items():
            trainer.board.add_scalar(name, value, step)
    if title:
        show(", ".join([title, *as_text(values)]))


class Trainer:
    """A training: what it consists of, its steps and tests, its log and checkpoints."""

    def __init__(self, device, args):
        self.device = device
        self.args = args
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        # For what waits for a disk, which takes as long as it takes.
        self.disk_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        seed_all(args.seed)  # for a random split: the same on every rank
        train_set, test_set = build_data(args)
        self.sets = {"train": train_set, "test": test_set}
        self.options = {name: str(value) for name, value in vars(args).items()}
        self.options |= {name: self.describe(name) for name in self.sets}
        self.epoch_steps = min(len(train_set) // args.global_batch_size, args.max_steps)
        if self.epoch_steps == 0 or len(test_set) == 0:
            sizes = f"{len(train_set)} samples to train with, {len(test_set)} to test"
            raise Problem(f"{sizes}: less than a global batch, or none")
        self.steps = args.epochs * self.epoch_steps
        self.step = 0  # of the whole training
        self.losses = []  # of the steps that are not in the log yet
        self.best = math.inf  # the lowest loss of a test
        self.saved = time.perf_counter()
        torch.manual_seed(seed_all(args.seed))  # the same first weights on every rank
        # Before it is sharded, only rank 0 has the weights, in its CPU's memory.
        with torch.device("meta") if args.shard and self.rank else nullcontext():
            self.model, parts = build_model(args, train_set)
        for name, layer in self.model.named_modules():
            text = f"{type(layer).__name__}({layer.extra_repr()})"
            self.options[f"model: layer {name}"] = text.split(" at 0x")[0]
        for name, x in self.model.named_parameters():
            text = f"{[*x.shape]}, {x.dtype}, trained: {x.requires_grad}"
            self.options[f"model: parameter {name}"] = text
        self.wrapped = wrap(self.model, parts, device, args)
        self.optimizer = build_optimizer(self.model, args)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise Problem("build_optimizer has to return one optimizer of torch.optim")
        self.options["optimizer"] = type(self.optimizer).__name__
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        # Weights and gradients stay fp32, what is multiplied is rounded.
        rounded = args.precision == "bf16"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=rounded)

    def train_step(self, batches):
        """Take one step, with the next batches."""
        sums = torch.zeros(2, device=self.device)
        for number in range(1, self.args.accumulate + 1):
            batch = next(batches)
            # For dropout: different on each rank, and the same again after a restart.
            seed = seed_all(self.args.seed, self.step, number, self.rank)
            torch.manual_seed(seed)  # of GPUs, too
            # With DDP, ranks average in the backward of the last batch only.
            with averaging(self.wrapped, on=number == self.args.accumulate):
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
        self.begin = self.asked = time.perf_counter()
        self.unasked = 0  # steps since then
        self.pause = 1
        while True:
            self.train_step(batches)
            self.unasked += 1
            end = self.step % self.epoch_steps == 0
            stop = late = False
            if end or self.unasked == self.pause:
                stop, late = self.ask()
            if stop or end or late or self.step % self.args.log_every == 0:
                self.log_steps()
            if stop or end or late:
                self.save()
                self.begin = time.perf_counter()
            if stop or end:
                return stop

    def ask(self):
        """Return whether to stop, and whether to save: what one rank has to, all do."""
        now = time.perf_counter()
        late = now > self.saved + 60 * self.args.save_minutes
        seconds = (now - self.asked) / self.unasked  # of a step
        most = torch.tensor([bool(SIGNALED), late, seconds])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.cpu_group)  # no GPU waits
        stop, late, seconds = most.tolist()
        self.asked = now
        self.unasked = 0
        self.pause = max(1, int(1 / seconds))  # with many ranks, asking takes a while
        return bool(stop), bool(late)

    def train_keys(self):
        """Yield the keys of this rank's batches in the rest of an epoch.

        All ranks make the same shuffled order, and each step takes its next global
        batch: the same samples on any number of ranks, and after a restart. What is
        left at the end, less than a global batch, is left out of this epoch.
        """
        epoch, done = divmod(self.step, self.epoch_steps)
        generator = torch.Generator().manual_seed(hash((self.args.seed, epoch)))
        order = torch.randperm(len(self.sets["train"]), generator=generator)
        size = self.args.global_batch_size
        for begin in range(done * size, self.epoch_steps * size, size):
            share = order[begin : begin + size][self.rank :: self.ranks]
            for batch in share.tensor_split(self.args.accumulate):
                yield [("train", epoch, index) for index in batch.tolist()]

    def log_steps(self):
        """Log the steps since the last line. Stop at a loss that is no number."""
        losses = torch.stack(self.losses).tolist()  # waits for the device
        self.losses = []
        norm = self.norm.full_tensor() if self.args.shard else self.norm
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
        """Test on all ranks. Return how many samples were tested, and the means."""
        self.model.eval()  # no dropout; BatchNorm takes the averages that it has kept
        # With --shard ranks compute together, so all need the same number of batches.
        count = len(self.sets["test"])
        own = range(self.rank, math.ceil(count / self.ranks) * self.ranks, self.ranks)
        size = self.args.batch_size
        parts = [own[begin : begin + size] for begin in range(0, len(own), size)]
        batches = self.read([("test", 0, i % count) for i in part] for part in parts)
        totals = 0
        for positions, batch in zip(parts, batches, strict=True):
            torch.manual_seed(seed_all(self.args.seed, positions[0]))
            with self.autocast:
                losses, weights, metrics = compute(self.model, batch, self.device)
            values = {"test loss": losses, **metrics}
            for x in [weights, *values.values()]:
                if x.shape[:1] != (len(positions),) or x.shape != losses.shape:
                    raise Problem("what compute returns must begin with the samples")
            # What is beyond the end only makes the ranks even.
            real = torch.tensor([i < count for i in positions], device=self.device)
            weights = weights.float().reshape(len(real), -1) * real[:, None]
            sums = [(x.reshape(weights.shape) * weights).sum() for x in values.values()]
            sums = torch.stack([*sums, weights.sum(), real.sum()])
            totals += sums.cpu().double()  # float32 cannot count beyond 16 million
        dist.all_reduce(totals, group=self.cpu_group)  # sums: the parts may differ
        *sums, weight, tested = totals.tolist()
        means = {name: total / weight for name, total in zip(values, sums, strict=True)}
        log(self, self.step, means, f"test of {tested:,.0f}")
        ended = self.step > 0 and self.step % self.epoch_steps == 0
        if ended and means["test loss"] < self.best:
            self.best = means["test loss"]
            self.export("best.safetensors")
        return int(tested), means

    def save(self):
        """Write checkpoint step-N, each rank a part. Every rank must call this."""
        for buffer in self.model.buffers():  # the averages that BatchNorm has kept
            dist.broadcast(buffer, src=0)
        folder = self.args.checkpoint_dir / f"step-{self.step}"
        new = folder.with_suffix(".tmp")
        state = {"training": self}
        dcp.save(state, checkpoint_id=new, process_group=self.disk_group)
        own = [file.name for file in new.glob(f"__{self.rank}_*")]
        if self.rank == 0:
            self.board.flush()
            (new / "options.json").write_text(json.dumps(self.options))
            own += [".metadata", "options.json"]
        sums = self.checksums(new, own)
        if self.rank == 0:
            (new / "checksums.json").write_text(json.dumps(sums))
            shutil.rmtree(folder, ignore_errors=True)  # one that could not be read
            new.rename(folder)  # only now it counts
            # Not its place in the list: those with higher numbers could not be read.
            there = checkpoints(folder.parent)
            for older in there[there.index(folder) + 2 :]:
                shutil.rmtree(older, ignore_errors=True)
        show(f"saved: {folder}")
        self.saved = time.perf_counter()

    def resume(self):
        """Resume from the newest checkpoint that can be read. All ranks call this."""
        folder = self.args.checkpoint_dir
        written = {path: {} for path in checkpoints(folder)}
        for path in written:
            with suppress(OSError, ValueError):
                written[path] = dict(json.loads((path / "checksums.json").read_text()))
        found = [self.options, written]
        dist.broadcast_object_list(found)  # all ranks take rank 0's
        words = f"{{}} differs: on rank 0 {{}}, on rank {self.rank} {{}}"
        self.compare(found[0], OWN, words)
        for path, sums in found[1].items():
            now = self.checksums(path, sorted(sums)[self.rank :: self.ranks])
            damaged = [name for name in sums if sums[name] != now[name]]
            if damaged or not sums:
                show(f"{path} cannot be read: damaged {damaged or 'checksums.json'}")
                continue
            options = json.loads((path / "options.json").read_text())
            words = "{} was {} where this training began, now {}: "
            words += "keep it, or name a new --checkpoint-dir"
            self.compare(options, MAY_CHANGE, words)
            state = {"training": self}
            dcp.load(state, checkpoint_id=path, process_group=self.disk_group)
            show(f"resumed: {path}")
            break
        if found[1] and self.step == 0:
            raise Problem(f"no checkpoint fits: name a folder other than {folder}")
        if self.rank == 0:
            for unfinished in folder.glob("step-*.tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
            self.board = SummaryWriter(folder, purge_step=self.step + 1)

    def checksums(self, folder, own):
        """Return a number for the bits of each file. Each rank calls this with some."""
        sums = dict.fromkeys(own)
        for file in own:
            with suppress(OSError, ValueError):  # it is missing, or empty
                sums[file] = zlib.crc32(np.memmap(folder / file, mode="r"))
        parts = [None] * self.ranks
        dist.all_gather_object(parts, sums, group=self.disk_group)
        return {name: number for part in parts for name, number in part.items()}

    def compare(self, others, may_differ, words):
        """Stop with words if an option differs from others' that may not."""
        for name in {**others, **self.options}:
            other, own = others.get(name), self.options.get(name)
            if other != own and name.split()[0] not in may_differ:
                raise Problem(words.format(name, other, own))
            if other != own:
                show(f"{name} was {other}, now it's {own}")

    def state_dict(self):
        """Return what a checkpoint holds. With --shard, tensors are in parts."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        # The step tells the epoch, the place in it, and the rate.
        numbers = {"best": self.best, "step": self.step}
        return {"model": model, "optimizer": optimizer, **numbers}

    def load_state_dict(self, state):
        """Take over what a checkpoint holds, but for rates and decay."""
        dcp_state.set_model_state_dict(self.model, state["model"])
        optimizer = dcp_state.get_optimizer_state_dict(self.model, self.optimizer)
        optimizer["state"] = state["optimizer"]["state"]
        dcp_state.set_optimizer_state_dict(self.model, self.optimizer, optimizer)
        self.best = state["best"]
        self.step = state["step"]

    def export(self, name):
        """Write the weights. Return for each whether the file has the same bits."""
        whole = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = dcp_state.get_model_state_dict(self.model, options=whole)
        equal = []
        if self.rank == 0:
            file = self.args.checkpoint_dir / name
            new = file.with_suffix(".tmp")
            copies = {key: x.contiguous().clone() for key, x in weights.items()}
            save_file(copies, new, metadata={"format": "pt"})
            with safe_open(new, "pt") as written:
                for key, x in weights.items():
                    equal.append(torch.equal(written.get_tensor(key), x))
            new.replace(file)
        dist.barrier(group=self.disk_group)
        return equal

    def read(self, keys):
        """Return an iterator over batches. Keys of samples are (set, epoch, index)."""
        loader = DataLoader(
            Seeded(self.sets, self.args.seed),
            batch_sampler=keys,
            collate_fn=collate,
            num_workers=self.args.workers,
            timeout=TIMEOUT.total_seconds() if self.args.workers else 0,
            pin_memory=self.device.type == "cuda",  # copied while the GPU computes
        )
        # Workers inherit this, so they read on when all processes of a job are told
        # to stop, and their rank still takes a step and saves.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        batches = iter(loader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return batches

    def describe(self, name):
        """Return how long a data set is, and a checksum of ten samples and names."""
        data = self.sets[name]
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise Problem(f"{name} is a stream: it has no length, or no [index]")
        keys = [(name, 0, i) for i in range(0, len(data), len(data) // 10 + 1)]
        # Read by workers: a file that the rank opened now would be shared by them all.
        bits, again = [bits_of(batch) for batch in self.read([keys, keys])]
        if bits != again:  # although the seed was the same
            raise Problem(f"{name}: draw random numbers from torch, numpy or random")
        if isinstance(data, datasets.DatasetFolder):  # its folder's name may differ
            bits += str(data.samples).replace(str(data.root), "").encode()
        return f"{len(data):,} samples with checksum {zlib.crc32(bits):08x}"


class Seeded(Dataset):
    """Data sets whose random changes depend on seed, epoch and sample, and no more."""

    def __init__(self, sets, seed):
        self.sets = sets
        self.seed = seed

    def __getitem__(self, key):
        name, epoch, index = key
        seed_all(self.seed, epoch, index)
        try:
            return self.sets[name][index]
        except Exception as error:  # of any type: a broken picture, or one too large
            where = f"{name} sample {index}"
            if isinstance(self.sets[name], datasets.DatasetFolder):
                where = self.sets[name].samples[index][0]
            raise Problem(f"{where} cannot be read: {error!r}") from None


def main(device, args):
    """Run on every rank: resume, then train, save and test until the last epoch."""
    lock_folder(args.checkpoint_dir)
    trainer = Trainer(device, args)
    trainer.resume()
    if trainer.step >= trainer.steps:
        show("this training has ended; for a new one, name a new --checkpoint-dir")
    tested, means = trainer.evaluate()  # if this fails, you know it before you train
    while trainer.step < trainer.steps:
        if trainer.train_epoch():
            show("Stopped as told. The same command resumes from here.")
            return 0 if "TORCHELASTIC_RUN_ID" in os.environ else os.EX_TEMPFAIL
        tested, means = trainer.evaluate()
    equal = trainer.export("model.safetensors")
    if dist.get_rank() == 0:
        samples = len(trainer.sets["test"])
        claim = f"{tested:,} of {samples:,} tested, {', '.join(as_text(means))}; "
        claim += f"model.safetensors has {sum(equal)} of {len(equal)} tensors equal"
        return prove(claim, tested == samples and all(equal))


# ---- Shared helpers, identical in every lesson

# Slurm, torchrun, Ctrl-C, a closed terminal: save, the end is near.
SIGNALS = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored
    SIGNALS.append(signal.SIGHUP)
SIGNALED = {}  # when each of them has come first
if not os.environ.get("DIST_TIMEOUT", "300").isdecimal():
    sys.exit("DIST_TIMEOUT is not a number of seconds")
TIMEOUT = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 300)))  # workers', too
# Options that may differ: on each rank; at each start. (test: its data)
OWN = ["data", "workers", "checkpoint_dir"]
MAY_CHANGE = [*OWN, "epochs", "test", "save_minutes", "batch_size", "accumulate", "lr"]
MAY_CHANGE += ["decay", "warm_up", "clip", "precision", "shard", "log_every"]


class Problem(Exception):
    """Stops the training with an error message instead of a traceback."""


def seed_all(*numbers):
    """Seed torch on the CPU, numpy and random with what these numbers make."""
    seed = hash(numbers) % 2**63
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    return seed


def bits_of(batch):
    """Return all bits of a batch, as bytes."""
    found = b""
    for x in tree_leaves(batch):
        if torch.is_tensor(x):
            x = x.detach().to_dense().resolve_conj().flatten().view(torch.uint8)
            found += f"{[*x.shape]}".encode() + x.numpy().tobytes()
        else:
            found += pickle.dumps(x)
    return found


def as_text(values):
    """Return values with their names, each with four digits."""
    return [f"{name} {value:.4g}" for name, value in values.items()]


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
    weights = model.state_dict()  # on rank 0; the others have no memory for them yet
    policy = MixedPrecisionPolicy()
    if args.precision == "bf16":  # sent and used in bf16; averaged, kept in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        for norm in model.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                fully_shard(norm)  # in fp32, as its averages are
    for part in [*parts, model]:  # each is gathered, used and freed by itself
        fully_shard(part, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # not all backends average
    if dist.get_rank() != 0:
        torch.__future__.set_swap_module_params_on_conversion(True)  # keeps tied ones
        model.to_empty(device=device)
    whole = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(model, weights, options=whole)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return model


def averaging(model, on):
    """Return a context in which backward averages gradients over the ranks if on."""
    # Shards are averaged each time: no rank has the memory for whole gradients.
    sharded = isinstance(model, FSDPModule)
    return nullcontext() if on or sharded else model.no_sync()


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def show(line):
    """Print a line, on rank 0."""
    if dist.get_rank() == 0:
        with suppress(OSError):  # the terminal may be closed
            print(line, flush=True)


def lock_folder(folder):
    """Keep other jobs out of this folder for as long as rank 0 lives."""
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Problem(f"another job is training in {folder}") from None
        except OSError:
            show("this disk has no locks: start no second job in this folder")
    dist.barrier()
    if not (folder / "lock").exists():
        raise Problem(f"rank {dist.get_rank()} cannot see rank 0's files in {folder}")


def checkpoints(folder):
    """Return the complete checkpoints in this folder, the newest first."""
    paths = folder.glob("step-[0-9]*")
    steps = [int(path.name[5:]) for path in paths if path.name[5:].isdigit()]
    return [folder / f"step-{step}" for step in sorted(steps, reverse=True)]


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


def note_signal(number, frame):
    """Note a signal. It may come in the middle of a step."""
    # Told again, end now. Not within 3 s: launcher and Slurm may both send it.
    first = SIGNALED.setdefault(number, time.monotonic())
    if number != signal.SIGUSR1 and time.monotonic() > first + 3:
        kill_workers()
        os._exit(128 + number)


def kill_workers():
    """Kill data workers that are left. Python would wait for them, perhaps for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's would raise an error
    for worker in multiprocessing.active_children():
        worker.kill()


def name_rank():
    """Set torchrun's variables: srun has started this rank, or it is the only one."""
    given = os.environ
    ranks = given.get("SLURM_STEP_NUM_TASKS", "1")
    copies = given.get("OMPI_COMM_WORLD_SIZE") or given.get("PMI_SIZE", "1")
    if copies not in ("1", ranks):  # in a step, srun may set PMI_SIZE
        sys.exit(f"mpirun has started this {copies} times: see day2/NODES.md")
    if ranks == "1" or sys.stdin.isatty():  # python, typed in a shell of srun --pty
        given.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WORLD_SIZE="1")
        return
    given.update(RANK=given["SLURM_PROCID"], LOCAL_RANK=given["SLURM_LOCALID"])
    counts = given["SLURM_STEP_TASKS_PER_NODE"].split(",")  # such as "4(x2),2"
    most = max(int(count.split("(")[0]) for count in counts)  # so all nodes agree
    given.update(LOCAL_WORLD_SIZE=str(most), WORLD_SIZE=ranks)
    nodes = ["scontrol", "show", "hostnames", given["SLURM_STEP_NODELIST"]]
    hosts = subprocess.check_output(nodes, text=True).split()
    port = 20_000 + (int(given["SLURM_JOB_ID"]) + int(given["SLURM_STEP_ID"])) % 10_000
    given.update(MASTER_ADDR=hosts[0], MASTER_PORT=str(port))
    if "SLURM_GPUS_ON_NODE" in given:  # though this rank may see one only
        given.setdefault("GPUS_ON_NODE", given["SLURM_GPUS_ON_NODE"])


def run(args):
    """Run as one rank: join the process group, call main, leave. Return the status."""
    warnings.filterwarnings("ignore", "TypedStorage")  # torch 2.6 about itself
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(int(os.environ["LOCAL_RANK"]), ranks_here)
    gpu = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    alone = {}
    if "MASTER_ADDR" not in os.environ:  # one process needs no port
        alone = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=gpu, **alone)
    if args.precision == "auto":  # few CPUs multiply in bf16, and old GPUs simulate it
        new = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        args.precision = "bf16" if new or device.type == "xpu" else "fp32"
    if args.workers is None:  # from the cores that are allotted on this node
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE", os.cpu_count()))
        spare = min(cores, os.cpu_count()) // ranks_here - 1
        args.workers = max(0, min(spare, 8))
    show(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    step = f"{args.global_batch_size} samples in {args.accumulate} batches a rank"
    show(f"{args.precision}, each step {step}, data workers of a rank: {args.workers}")
    try:
        if args.shard and backend == "gloo" and device.type != "cpu":
            raise Problem("gloo cannot shard on GPUs: --shard needs one for each rank")
        status = main(device, args)
        dist.barrier()  # leave together; if a rank fails before, the job ends there
    except Exception as error:  # on this rank alone, or on all of them
        kill_workers()
        if dist.get_rank() != 0 or "by peer" in str(error):
            time.sleep(3)  # the rank with the cause says it first, and ends the job
        if isinstance(error, (ConnectionError, EOFError)):
            error = Problem(f"a data worker has died, perhaps of memory: {error!r}")
        if isinstance(error, (Problem, OSError, dcp.CheckpointException)):
            print(str(error).strip().splitlines()[-1], file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        os._exit(1)  # Python would wait for threads, perhaps for ever
    for number in SIGNALS:  # too late to change the exit status
        signal.signal(number, signal.SIG_IGN)
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    kill_workers()
    return status  # 0 if the lesson has proved its claim, 75 if it was stopped


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ["LOCAL_RANK"] != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    folder = os.environ.get("CHECKPOINT_DIR", f"runs/{Path(__file__).stem}")
    add("epochs", nargs="?", type=int, default=1, help="in total (1)")
    add("--data", default="mnist", help="mnist, random, or a folder of images (mnist)")
    add("--model", choices=["net", "resnet18"], default="net", help="(net)")
    add("--checkpoint-dir", type=Path, default=folder, help=f"({folder})")
    add("--save-minutes", type=float, default=30, help="and after each epoch (30)")
    add("--global-batch-size", type=int, default=256, help="of all ranks (256)")
    add("--batch-size", type=int, default=64, help="of a rank at once, at most (64)")
    add("--lr", type=float, default=0.05, help="highest learning rate (0.05)")
    add("--decay", type=float, default=0.0, help="of weights (0)")
    add("--warm-up", type=int, default=20, help="steps until then (20)")
    add("--clip", type=float, default=1.0, help="longest gradient, or inf (1.0)")
    add("--seed", type=int, default=0, help="for weights, order, augmentation (0)")
    add("--precision", choices=["auto", "fp32", "bf16"], default="auto", help="(auto)")
    add("--shard", action="store_true", help="FSDP2 instead of DDP")
    add("--workers", type=int, help="that read data for each rank (spare cores)")
    add("--log-every", type=int, default=50, help="steps (50)")
    add("--max-steps", type=int, default=10**9, help="of each epoch (all)")
    args = parser.parse_args()
    may_be_0 = ["workers", "decay", "save_minutes", "seed"]
    for name, number in vars(args).items():
        least = 0 if name in may_be_0 else 1e-9
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
        signal.signal(each, note_signal)
    if "RANK" not in os.environ:
        name_rank()
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])  # Kubernetes gives none
    sys.exit(run(parse_args()))
