"""Lesson 13: the file you take home. One training script for every machine.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  resuming, bf16, accumulation, clipping, exact tests, --shard
Run:       scripts/multinode_setup_and_run.sh day2/13_train.py
Look for:  => 10,000 of 10,000 tested, ... right; model.safetensors has ... equal: ok
Try next:  kill -9 a rank, then the same command; scripts/compare_losses.py RUN RUN
"""

# Started by python, torchrun, srun or sbatch: 13_train.py [EPOCHS]. The functions that
# begin with "Yours" are to be changed. The rest then still holds: one seed gives one
# training, interrupted or not, on one process or on many, except for rounding, dropout
# (it differs on each rank) and BatchNorm (each rank sees a part of a batch).

import argparse
import fcntl
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models
from torchvision.transforms import v2


def build_data(args):
    """Yours: the data for training and for testing. What is random comes from torch."""
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    to_tensor.append(v2.Normalize([0.5] * 3, [0.25] * 3))
    if args.data == "random":  # nothing to learn: for a first try, and to measure speed
        images = datasets.FakeData(2_000, (3, 64, 64), 10, v2.Compose(to_tensor))
        return images, Subset(images, range(500))
    if args.data == "mnist":
        if not (DATA / "MNIST").is_dir():
            raise Problem(f"MNIST is not in {DATA}: name your --data")
        transform = v2.Compose([v2.Grayscale(3), *to_tensor])
        train_set = datasets.MNIST(DATA, train=True, transform=transform)
        return train_set, datasets.MNIST(DATA, train=False, transform=transform)
    augment = [v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), *to_tensor]
    plain = [v2.Resize(72), v2.CenterCrop(64), *to_tensor]
    test = "val" if Path(args.data, "val").is_dir() else "test"
    folder = partial(datasets.ImageFolder, loader=read_picture)
    train_set = folder(f"{args.data}/train", v2.Compose(augment))
    test_set = folder(f"{args.data}/{test}", v2.Compose(plain))
    if train_set.classes != test_set.classes:
        raise Problem(f"train and {test} of {args.data} have different classes")
    if train_set.classes[0].startswith("."):
        raise Problem(f"move {train_set.classes[0]} out of {args.data}: it's no class")
    return train_set, test_set


def read_picture(file):
    """Return a picture in three colors, 8 bits each; more bits would turn white."""
    picture = Image.open(file)
    if picture.mode[0] in "IF":
        raise ValueError(f"its mode {picture.mode} has more than 8 bits")
    return picture.convert("RGB")


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
    """Yours: of each sample or token: the loss, how right (0 to 1), the weight."""
    images, labels = batch
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    if device.type == "cuda":
        images = images.contiguous(memory_format=torch.channels_last)  # tensor cores
    outputs = model(images)
    losses = F.cross_entropy(outputs, labels, reduction="none")  # not their mean
    right = (outputs.argmax(dim=1) == labels).float()
    return losses, right, torch.ones_like(losses)  # a weight of 0 for padding


def schedule(step, steps, args):
    """Yours: which part of --lr a step takes. Here: warm-up, then half a cosine."""
    warm_up = min(1, (step + 1) / args.warm_up)
    return warm_up * (1 + math.cos(math.pi * step / steps)) / 2


def log(trainer, step, values):
    """Yours: what is logged, and where. On rank 0 only, such as wandb.log(values)."""
    for name, value in values.items():
        trainer.board.add_scalar(name, value, step)


def main(device, args):
    """Run on every rank: resume, then train, save and test until the last epoch."""
    lock_folder(args.checkpoint_dir)
    trainer = Trainer(device, args)
    trainer.resume()
    if trainer.step >= trainer.steps:
        show("this training has ended; for a new one, name a new --checkpoint-dir")
    tested, right = trainer.evaluate()  # if this fails, you know it before you train
    while trainer.step < trainer.steps:
        if trainer.train_epoch():
            show("Stopped as told. The same command resumes from here.")
            return 0 if "TORCHELASTIC_RUN_ID" in os.environ else os.EX_TEMPFAIL
        tested, right = trainer.evaluate()
    equal = trainer.export("model.safetensors")
    if dist.get_rank() == 0:
        samples = len(trainer.sets["test"])
        claim = f"{tested:,} of {samples:,} tested, {right:.2%} right; "
        claim += f"model.safetensors has {sum(equal)} of {len(equal)} tensors equal"
        return prove(claim, tested == samples and all(equal))


class Trainer:
    """A training: what it consists of, its steps and tests, its log and checkpoints."""

    def __init__(self, device, args):
        self.signals = {}  # when each of SIGNALS has come first
        for number in SIGNALS:
            signal.signal(number, self.note_signal)
        self.device = device
        self.args = args
        torch.manual_seed(args.seed)  # for a random split: the same on every rank
        train_set, test_set = build_data(args)
        self.sets = {"train": train_set, "test": test_set}
        self.epoch_steps = min(len(train_set) // args.global_batch_size, args.max_steps)
        if self.epoch_steps == 0 or len(test_set) == 0:
            sizes = f"{len(train_set)} samples to train with, {len(test_set)} to test"
            raise Problem(f"{sizes}: less than a global batch, or none")
        self.steps = args.epochs * self.epoch_steps
        self.step = 0  # of the whole training
        self.batches = []  # what the loader reads next: lists of (set, epoch, index)
        data = Seeded(self.sets, args.seed)
        self.loader = DataLoader(
            data,
            batch_sampler=self.batches,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
            timeout=TIMEOUT.total_seconds() if args.workers else 0,
            pin_memory=device.type == "cuda",  # copied while the GPU computes
        )
        torch.manual_seed(args.seed)  # the same first weights on every rank
        # Before it is sharded, only rank 0 has the weights, in its CPU's memory.
        meta = args.shard and dist.get_rank() != 0
        with torch.device("meta") if meta else nullcontext():
            self.model, parts = build_model(args, train_set)
        self.wrapped = wrap(self.model, parts, device, args)
        self.optimizer = build_optimizer(self.model, args)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        # Weights and gradients stay fp32, what is multiplied is rounded.
        rounded = args.precision == "bf16"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=rounded)
        self.options = {name: str(value) for name, value in vars(args).items()}
        self.options |= {name: digest_of(data, name, args) for name in self.sets}
        for name, tensor in self.model.state_dict().items():
            self.options[f"the shape of {name}"] = str([*tensor.shape])
        self.losses = []  # of the steps that are not in the log yet
        self.best = math.inf  # the lowest loss of a test
        self.saved = time.monotonic()
        self.cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def note_signal(self, number, frame):
        """Note a signal. It may come in the middle of a step."""
        # Told again, end now. Not within 3 s: launcher and Slurm may both send it.
        first = self.signals.setdefault(number, time.monotonic())
        if number != signal.SIGUSR1 and time.monotonic() > first + 3:
            kill_workers()
            os._exit(128 + number)

    def train_epoch(self):
        """Train to the epoch's end or until a signal; save. Return whether one came."""
        epoch, done = divmod(self.step, self.epoch_steps)
        # All ranks make the same shuffled list, and each step takes its next global
        # batch: the same samples on any number of ranks, and after a restart. What is
        # left at the end, less than a global batch, is left out of this epoch.
        generator = torch.Generator().manual_seed(self.args.seed + epoch)
        order = torch.randperm(len(self.sets["train"]), generator=generator)
        global_batches = order.split(self.args.global_batch_size)
        own = []
        for batch in global_batches[done : self.epoch_steps]:
            share = batch[dist.get_rank() :: dist.get_world_size()]
            own += share.tensor_split(self.args.accumulate)
        batches = self.load("train", epoch, own)
        self.wrapped.train()
        self.begin = time.perf_counter()
        self.waited = 0
        leave = False
        with trace(self.args) as profiler:
            while not leave:
                self.train_step(batches)
                late = time.monotonic() > self.saved + 60 * self.args.save_minutes
                # What one rank is told, all do. Sent from CPU to CPU: no GPU waits.
                flags = torch.tensor([bool(self.signals), late], dtype=torch.int32)
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.cpu_group)
                stop, late = flags.bool().tolist()
                leave = stop or self.step % self.epoch_steps == 0
                if leave or late or self.step % self.args.log_every == 0:
                    self.log_steps()
                if leave or late:
                    self.save()
                    self.begin = time.perf_counter()
                if profiler:
                    profiler.step()
        self.args.profile = 0  # one trace is enough
        return stop

    def load(self, name, epoch, batches):
        """Return an iterator over these batches of a data set, given as indices."""
        self.batches[:] = [[(name, epoch, i) for i in x.tolist()] for x in batches]
        # Workers inherit this, so they read on when all processes of a job are told
        # to stop, and their rank still takes a step and saves.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        iterator = iter(self.loader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return iterator

    def train_step(self, batches):
        """Take one step, with the next batches."""
        sums = torch.zeros(2, device=self.device)
        for number in range(1, self.args.accumulate + 1):
            begin = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - begin
            # For dropout: different on each rank, and the same again after a restart.
            seeds = (self.args.seed, self.step, number, dist.get_rank())
            torch.manual_seed(hash(seeds))
            # One message a step: ranks average in the backward of its last batch only.
            with averaging(self.wrapped, on=number == self.args.accumulate):
                with self.autocast:
                    losses, _, weights = compute(self.wrapped, batch, self.device)
                loss = (losses * weights).sum()
                loss.backward()  # gradients add up
            sums += torch.stack([loss.detach(), weights.sum()])  # no .item(): it waits
        # The gradients are sums over samples, which DDP divides by the number of ranks.
        # This makes them means: each sample of the global batch counts the same.
        dist.all_reduce(sums)
        loss, weight = sums
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, dist.get_world_size() / weight)
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        factor = schedule(self.step, self.steps, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss / weight)
        self.step += 1

    def log_steps(self):
        """Log the steps since the last line."""
        losses = torch.stack(self.losses).tolist()  # waits for the device
        self.losses = []
        norm = self.norm.full_tensor() if self.args.shard else self.norm
        first = self.step - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            self.report(step, {"loss": loss})
        seconds = time.perf_counter() - self.begin
        speed = len(losses) * self.args.global_batch_size / seconds
        rate = self.optimizer.param_groups[0]["lr"]
        values = {"gradient": norm.item(), "rate": rate, "samples/s": speed}
        values["waiting for data"] = self.waited / seconds
        if self.device.type == "cuda":
            values["MB"] = torch.cuda.max_memory_allocated() / 1e6
        title = f"step {self.step:,} of {self.steps:,}, loss {losses[-1]:.4f}"
        self.report(self.step, values, title)
        for step, value in enumerate([*losses, values["gradient"]], start=first):
            if not math.isfinite(value):
                raise Problem(f"a loss or gradient was {value} by step {step}")
        self.begin = time.perf_counter()
        self.waited = 0

    @torch.no_grad()
    def evaluate(self):
        """Test on all ranks. Return how many samples were tested, and how right."""
        self.model.eval()  # no dropout; BatchNorm takes the averages that it has kept
        # With --shard ranks compute together, so all need the same number of batches.
        count = len(self.sets["test"])
        ranks = dist.get_world_size()
        end = math.ceil(count / ranks) * ranks
        positions = torch.arange(dist.get_rank(), end, ranks)
        own = positions.split(self.args.batch_size)
        batches = self.load("test", 0, [positions % count for positions in own])
        totals = torch.zeros(4, device=self.device)
        for positions, batch in zip(own, batches, strict=True):
            with self.autocast:
                losses, right, weights = compute(self.model, batch, self.device)
            # What is beyond the end only makes the ranks even.
            real = (positions < count).to(self.device, torch.float32)
            sums = [losses * weights, right * weights, weights]
            sums = [x.float().reshape(len(real), -1).sum(dim=1) @ real for x in sums]
            totals += torch.stack([*sums, real.sum()])
        dist.all_reduce(totals)  # sums, not means: the parts may differ in size
        loss, right, weight, tested = totals.tolist()
        loss, right = loss / weight, right / weight
        values = {"test loss": loss, "accuracy": right}
        self.report(self.step, values, f"test of {tested:,.0f}")
        if self.step > 0 and self.step % self.epoch_steps == 0 and loss < self.best:
            self.best = loss
            self.export("best.safetensors")
        return int(tested), right

    def report(self, step, values, title=""):
        """Log values, and print them if they have a title, on rank 0."""
        if dist.get_rank() == 0:
            log(self, step, values)
            if title:
                self.board.flush()  # now, or a crash could take it away
        if title:
            numbers = [f"{x} {y:,.{0 if y >= 100 else 4}f}" for x, y in values.items()]
            show(", ".join([title, *numbers]))

    def save(self):
        """Write checkpoint step-N, each rank a part. Every rank must call this."""
        for buffer in self.model.buffers():  # the averages that BatchNorm has kept
            dist.broadcast(buffer, src=0)
        folder = self.args.checkpoint_dir / f"step-{self.step}"
        unfinished = folder.with_suffix(".tmp")
        try:
            dcp.save({"training": self}, checkpoint_id=unfinished)
        except dcp.CheckpointException as error:  # on all ranks
            cause = last_line(error)
            if "unexpected pos" in cause:  # torch's words for it
                cause = "no space left"
            raise Problem(f"{folder} not written: {cause}") from None
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # one that could not be read
            unfinished.rename(folder)  # only now it counts
            # Not its place in the list: those with higher numbers could not be read.
            there = checkpoints(folder.parent)
            for older in there[there.index(folder) + 2 :]:
                shutil.rmtree(older, ignore_errors=True)
        show(f"saved: {folder}")
        self.saved = time.monotonic()

    def resume(self):
        """Resume from the newest checkpoint that can be read. All ranks call this."""
        folder = self.args.checkpoint_dir
        found = [self.options, checkpoints(folder)]
        dist.broadcast_object_list(found)  # all ranks take rank 0's
        for name, there, here in differences(found[0], self.options):
            if name not in OWN:
                others = f"on rank {dist.get_rank()} {here}"
                raise Problem(f"{name} differs: on rank 0 {there}, {others}")
        logging.disable(logging.WARNING)  # dcp's, with tracebacks
        for path in found[1]:
            try:
                dcp.load({"training": self}, checkpoint_id=path)
                show(f"resumed: {path}")
                break
            except (dcp.CheckpointException, ValueError) as error:  # on all ranks
                show(f"{path} cannot be read: {last_line(error)}")
        logging.disable(logging.NOTSET)
        if found[1] and self.step == 0:
            raise Problem(f"no checkpoint fits: name a folder other than {folder}")
        if dist.get_rank() == 0:
            for unfinished in folder.glob("step-*.tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
            self.board = SummaryWriter(folder, purge_step=self.step + 1)

    def state_dict(self):
        """Return what a checkpoint holds. With --shard, tensors are in parts."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "options": json.dumps(self.options),
            "best": self.best,
            "step": self.step,  # it tells the epoch, the place in it, and the rate
        }

    def load_state_dict(self, state):
        """Take over what a checkpoint holds, if it is of this training."""
        begun = json.loads(state["options"])
        for name, was, now in differences(begun, self.options):
            if name not in MAY_CHANGE:
                other = f"{name} was {was} where this training began, now {now}"
                raise Problem(f"{other}: keep it, or name a new --checkpoint-dir")
            show(f"{name} was {was}, now it's {now}")
        dcp_state.set_model_state_dict(self.model, state["model"])
        # Rates and decay stay as this start has them.
        optimizer = dcp_state.get_optimizer_state_dict(self.model, self.optimizer)
        optimizer["state"] = state["optimizer"]["state"]
        dcp_state.set_optimizer_state_dict(self.model, self.optimizer, optimizer)
        if begun["test"] == self.options["test"]:
            self.best = state["best"]
        self.step = state["step"]

    def export(self, name):
        """Write the weights. Return for each whether a new model gets the same bits."""
        whole = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = dcp_state.get_model_state_dict(self.model, options=whole)
        if dist.get_rank() != 0:
            return []
        file = self.args.checkpoint_dir / name
        copies = {key: x.contiguous().clone() for key, x in weights.items()}
        save_file(copies, file.with_suffix(".tmp"), metadata={"format": "pt"})
        file.with_suffix(".tmp").replace(file)
        model, _ = build_model(self.args, self.sets["train"])
        model.load_state_dict(load_file(file))
        return [torch.equal(x, weights[key]) for key, x in model.state_dict().items()]


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
# Slurm, torchrun, Ctrl-C, a closed terminal: save, the end is near.
SIGNALS = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored
    SIGNALS.append(signal.SIGHUP)
if not os.environ.get("DIST_TIMEOUT", "300").isdecimal():
    sys.exit("DIST_TIMEOUT is not a number of seconds")
TIMEOUT = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 300)))  # workers', too
# Options that may differ: on each rank; at each start. (train and test: the data)
OWN = ["data", "workers", "checkpoint_dir"]
MAY_CHANGE = [*OWN, "epochs", "test", "save_minutes", "batch_size", "accumulate", "lr"]
MAY_CHANGE += ["decay", "warm_up", "clip", "precision", "shard", "compile"]
MAY_CHANGE += ["log_every", "profile"]


class Problem(Exception):
    """Stops the training with an error message instead of a traceback."""


def last_line(error):
    """Return the last line of an error: the cause, if other processes had it."""
    words = str(error).strip() or type(error).__name__
    return words.splitlines()[-1]


class Seeded(Dataset):
    """Data sets whose random changes depend on seed, epoch and sample, and no more."""

    def __init__(self, sets, seed):
        self.sets = sets
        self.seed = seed

    def __getitem__(self, key):
        name, epoch, index = key
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
        try:
            return self.sets[name][index]
        except Exception as error:  # of any type: a broken picture, or one too large
            where = f"{name} sample {index}"
            if isinstance(self.sets[name], datasets.DatasetFolder):
                where = self.sets[name].samples[index][0]
            cause = last_line(traceback.format_exception_only(error)[-1])
            raise Problem(f"{where} cannot be read: {cause}") from None


def digest_of(data, name, args):
    """Return how many samples a set has, and a digest of ten and of pictures' names."""
    samples = data.sets[name]
    keys = [(name, 0, i) for i in range(0, len(samples), len(samples) // 10 + 1)]
    # In a worker: a file that the rank opened now would be shared by all its workers.
    one = {"num_workers": min(1, args.workers)}
    one["timeout"] = one["num_workers"] * TIMEOUT.total_seconds()
    loader = DataLoader(data, None, sampler=keys * 2, **one)
    digests = [sha256(str(tree_map(bits_of, x)).encode()).hexdigest() for x in loader]
    if digests[len(keys) :] != digests[: len(keys)]:  # the same seed, another sample
        raise Problem(f"{name}: draw what is random from torch, not numpy or random")
    text = str(digests)
    if isinstance(samples, datasets.DatasetFolder):  # its folder's name may differ
        text += str(samples.samples).replace(str(samples.root), "")
    digest = sha256(text.encode()).hexdigest()[:8]
    return f"{len(samples):,} samples with digest {digest}"


def bits_of(value):
    """Return all bits of a tensor, and anything else as it is."""
    if not torch.is_tensor(value):
        return value
    return value.detach().to_dense().flatten().view(torch.uint8).numpy().tobytes()


def wrap(model, parts, device, args):
    """Return the model as it is trained, on its device: with DDP, or in shards."""
    for part in parts if args.compile else []:
        # part.compile() leaves what torch.nn has written as it is, before torch 2.14.
        part.forward = torch.compile(part.forward)
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


def trace(args):
    """Return a profiler that writes a trace of so many steps, on rank 0."""
    if not args.profile or dist.get_rank() != 0:
        return nullcontext()
    steps = torch.profiler.schedule(wait=2, warmup=1, active=args.profile, repeat=1)
    write = torch.profiler.tensorboard_trace_handler(args.checkpoint_dir)
    return torch.profiler.profile(schedule=steps, on_trace_ready=write)


def averaging(model, on):
    """Return a context in which backward averages gradients over the ranks if on."""
    if not isinstance(model, DistributedDataParallel):
        model.set_requires_gradient_sync(on)  # FSDP2's name for it
    elif not on:
        return model.no_sync()
    return nullcontext()


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


def differences(there, here):
    """Return what differs in two dicts: [(name, value there, value here), ...]."""
    names = [x for x in {**there, **here} if there.get(x) != here.get(x)]
    return [(name, there.get(name), here.get(name)) for name in names]


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
    except Exception as error:  # on this rank alone, or on all of them
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's may raise here
            for number in SIGNALS:  # do not save; finally comes next
                signal.signal(number, lambda number, frame: sys.exit(1))
            gone = isinstance(error, RuntimeError) and "by peer" in str(error)  # gloo's
            if gone or dist.get_rank() != 0:
                time.sleep(3)  # if on all, rank 0 says it, and its end stops the job
            if gone:
                error = Problem(f"has another rank ended first? {last_line(error)}")
            killed = "DataLoader worker (pid" in str(error)
            if killed or isinstance(error, (ConnectionError, EOFError)):
                error = Problem(f"a data worker has died, perhaps of memory: {error!r}")
            if isinstance(error, (Problem, OSError, SafetensorError)):
                print(last_line(error), file=sys.stderr)
            else:
                traceback.print_exception(error)
        finally:
            kill_workers()
            os._exit(1)  # Python would wait for threads, perhaps for ever
    dist.barrier()  # leave together; if a rank fails before, the job ends there
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
    add("--clip", type=float, default=1.0, help="longest gradient (1.0)")
    add("--seed", type=int, default=0, help="for weights, order, augmentation (0)")
    add("--precision", choices=["auto", "fp32", "bf16"], default="auto", help="(auto)")
    add("--shard", action="store_true", help="FSDP2 instead of DDP")
    add("--compile", action="store_true", help="torch.compile, each part by itself")
    add("--workers", type=int, help="that read data for each rank (spare cores)")
    add("--log-every", type=int, default=50, help="steps (50)")
    add("--max-steps", type=int, default=10**9, help="of each epoch (all)")
    add("--profile", type=int, default=0, help="steps, for a trace (0)")
    args = parser.parse_args()
    may_be_0 = ["workers", "decay", "profile", "save_minutes", "seed"]
    for name, number in vars(args).items():
        least = 0 if name in may_be_0 else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
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
    if "RANK" not in os.environ:
        name_rank()
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])  # Kubernetes gives none
    sys.exit(run(parse_args()))
