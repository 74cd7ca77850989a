"""Lesson 13: the file you take home. One training script for every machine.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  resuming, bf16, accumulation, clipping, exact tests, --shard, --compare
Run:       scripts/multinode_setup_and_run.sh day2/13_train.py
Look for:  => 10,000 of 10,000 tested, ... right: ok
Try next:  kill -9 a rank, then the same command; --compare with another run's folder.
"""

# Started by python, torchrun, srun or sbatch: 13_train.py [EPOCHS [SAVE_EVERY]]. Yours
# are the first three functions. If you change only these, the rest still holds: one
# seed gives one training, interrupted or not, on one process or on many, except for
# rounding, dropout (it differs on each rank) and BatchNorm (it sees less).

import argparse
import fcntl
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from datetime import timedelta
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models
from torchvision.transforms import v2


def build_model(args, classes):
    """Yours: the model, here for images, float32 [batch, 3, height, width]."""
    if args.model == "resnet18":
        return models.resnet18(num_classes=classes)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, kernel_size=5, stride=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, kernel_size=5, stride=2), nn.ReLU()),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU()),
        nn.Linear(64, classes),
    )


def build_data(args):
    """Yours: data for training, data for testing, and the number of classes.

    Both give pairs (image, label). All that is random in them must come from torch.
    """
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    to_tensor.append(v2.Normalize([0.5] * 3, [0.25] * 3))
    if args.data == "random":  # nothing to learn: for a first try, and to measure speed
        images = datasets.FakeData(2_000, (3, 64, 64), 10, v2.Compose(to_tensor))
        return images, Subset(images, range(500)), 10
    if args.data == "mnist":
        transform = v2.Compose([v2.Grayscale(3), *to_tensor])
        train_set = datasets.MNIST(DATA, train=True, transform=transform)
        return train_set, datasets.MNIST(DATA, train=False, transform=transform), 10
    augment = [v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), *to_tensor]
    plain = [v2.Resize(72), v2.CenterCrop(64), *to_tensor]
    test = "val" if Path(args.data, "val").is_dir() else "test"
    train_set = datasets.ImageFolder(f"{args.data}/train", v2.Compose(augment))
    test_set = datasets.ImageFolder(f"{args.data}/{test}", v2.Compose(plain))
    if train_set.classes != test_set.classes:
        raise Problem(f"train and {test} of {args.data} have different classes")
    hidden = [name for name in train_set.classes if name.startswith(".")]
    if hidden:
        raise Problem(f"move {hidden[0]} out of {args.data}: it counts as a class")
    return train_set, test_set, len(train_set.classes)


def losses_and_correct(outputs, labels):
    """Yours: the loss of each sample of a batch, and which of them are right."""
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return losses, outputs.argmax(dim=1) == labels


def main(device, args):
    """Run on every rank: resume, then train, save and test until the last epoch."""
    lock_folder(args.checkpoint_dir)
    trainer = Trainer(device, args)
    trainer.resume()
    if trainer.step == trainer.steps:
        show("this training has ended; for a new one, name a new --checkpoint-dir")
    tested, right = trainer.evaluate()  # if this fails, you know it before you train
    while trainer.step < trainer.steps:
        if trainer.train_epoch():  # told to stop: there may be no time for a test
            trainer.save()
            show("Stopped as told. The same command resumes from here.")
            return 0
        tested, right = trainer.evaluate()
        epoch = trainer.step // trainer.epoch_steps
        if epoch % args.save_every == 0 or trainer.step == trainer.steps:
            trainer.save()
    whole = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(trainer.model, options=whole)
    if dist.get_rank() == 0:
        file = args.checkpoint_dir / "model.pt"
        torch.save(weights, file)
        build_model(args, trainer.classes).load_state_dict(torch.load(file))  # it fits
        print(f"to use it: model.load_state_dict(torch.load('{file}'))")
        if args.compare:
            return prove(*compare(args))
        samples = len(trainer.test_set)
        claim = f"{tested:,} of {samples:,} tested, {right / tested:.2%} right"
        return prove(claim, tested == samples)


class Trainer:
    """A training: what it consists of, its steps and tests, its log and checkpoints."""

    def __init__(self, device, args):
        self.device = device
        self.args = args
        torch.manual_seed(args.seed)  # for a random split: the same on every rank
        self.train_set, self.test_set, self.classes = build_data(args)
        check_data(self.train_set, self.test_set)
        samples = len(self.train_set)
        self.epoch_steps = min(samples // args.global_batch_size, args.max_steps)
        if self.epoch_steps == 0:
            raise Problem(f"{samples} samples are less than a global batch")
        self.steps = args.epochs * self.epoch_steps
        self.step = 0  # of the whole training
        torch.manual_seed(args.seed)  # the same first weights on every rank
        self.model = build_model(args, self.classes).to(device)
        self.wrapped = wrap(self.model, args)
        self.optimizer = torch.optim.SGD(self.model.parameters(), args.lr, momentum=0.9)
        # Weights and gradients stay fp32, what is multiplied is rounded.
        rounded = args.precision != "fp32"
        dtype = PRECISIONS[args.precision]
        self.autocast = torch.autocast(device.type, dtype, enabled=rounded)
        fp16 = args.precision == "fp16"  # its small numbers would become 0: scale them
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.options = {name: getattr(args, name) for name in FIXED}
        self.options["samples"] = samples
        self.losses = []  # of the steps that are not in the log yet
        self.results = {}  # the newest loss, and what the newest test has found
        self.told_to_stop = False
        self.signals = {}  # when each of SIGNALS has come first
        for number in SIGNALS:
            signal.signal(number, self.note_signal)

    def note_signal(self, number, frame):
        """Note a signal. It may come in the middle of a step."""
        self.told_to_stop = True
        # Told again, end now. Not within 3 s: launcher and Slurm may both send it.
        first = self.signals.setdefault(number, time.monotonic())
        if number != signal.SIGUSR1 and time.monotonic() > first + 3:
            kill_workers()
            os._exit(128 + number)

    def train_epoch(self):
        """Train to the end of the epoch, or until a signal. Return whether one came."""
        epoch, done = divmod(self.step, self.epoch_steps)
        # All ranks make the same shuffled list, and each step takes its next global
        # batch: the same samples on any number of ranks, and after a restart. What is
        # left at the end, less than a global batch, is left out of this epoch.
        generator = torch.Generator().manual_seed(self.args.seed + epoch)
        order = torch.randperm(len(self.train_set), generator=generator)
        global_batches = order.split(self.args.global_batch_size)
        parts = []
        for batch in global_batches[done : self.epoch_steps]:
            own = batch[dist.get_rank() :: dist.get_world_size()]
            parts += own.tensor_split(self.args.accumulate)
        batches = self.load(self.train_set, parts, epoch)
        self.wrapped.train()
        self.begin = time.perf_counter()
        epoch_ends = False
        stop = False
        while not epoch_ends and not stop:
            self.train_step(islice(batches, self.args.accumulate))
            epoch_ends = self.step % self.epoch_steps == 0
            if epoch_ends or self.step % self.args.log_every == 0:
                stop = self.log_steps()
        for buffer in self.model.buffers():  # the averages that BatchNorm has kept
            dist.broadcast(buffer, src=0)
        return stop

    def load(self, dataset, batches, epoch):
        """Return an iterator over these batches of a data set."""
        loader = DataLoader(
            Seeded(dataset, self.args.seed, epoch),
            batch_sampler=[batch.tolist() for batch in batches],
            num_workers=self.args.workers,
            timeout=TIMEOUT if self.args.workers else 0,
            pin_memory=self.device.type == "cuda",  # copied while the GPU computes
        )
        # Workers inherit this, so they read on when all processes of a job are told
        # to stop, and their rank still takes a step and saves.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        iterator = iter(loader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return iterator

    def train_step(self, batches):
        """Take one step, with all batches that this rank has for it."""
        # DDP divides by the number of ranks. So each sample counts the same:
        weight = dist.get_world_size() / self.args.global_batch_size
        losses = []
        for number, (images, labels) in enumerate(batches, start=1):
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            # For dropout: different on each rank, and the same again after a restart.
            seeds = (self.args.seed, self.step, number, dist.get_rank())
            torch.manual_seed(hash(seeds))
            # One message a step: ranks average in the backward of its last batch only.
            with averaging(self.wrapped, on=number == self.args.accumulate):
                with self.autocast:
                    each, _ = losses_and_correct(self.wrapped(images), labels)
                loss = each.sum() * weight
                self.scaler.scale(loss).backward()  # gradients add up
            losses.append(loss.detach())  # no .item(): it waits for the GPU
        self.scaler.unscale_(self.optimizer)  # clip the gradients as they are
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        warm_up = min(1, (self.step + 1) / self.args.warm_up)
        cosine = (1 + math.cos(math.pi * self.step / self.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * warm_up * cosine
        self.scaler.step(self.optimizer)  # fp16: not if a gradient is infinite
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(torch.stack(losses).sum())
        self.step += 1

    def log_steps(self):
        """Log the steps since the last line. Return whether a rank was told to stop."""
        stop = torch.tensor(float(self.told_to_stop), device=self.device)
        sums = torch.stack([*self.losses, stop])
        dist.all_reduce(sums)  # over the ranks, in place
        *losses, stop = (sums / dist.get_world_size()).tolist()  # waits for the device
        self.losses = []
        self.results["loss"] = losses[-1]
        split = {"ranks": dist.get_world_size(), "accumulate": self.args.accumulate}
        for step, loss in enumerate(losses, start=self.step - len(losses) + 1):
            self.write(step, {"loss": loss, **split})
        rate = self.optimizer.param_groups[0]["lr"]
        seconds = time.perf_counter() - self.begin
        speed = len(losses) * self.args.global_batch_size / seconds
        memory = peak_memory(self.device)
        self.write(self.step, {"rate": rate, "samples/s": speed, "MB": memory})
        show(
            f"step {self.step:,} of {self.steps:,}: loss {losses[-1]:.4f}, "
            f"rate {rate:.4f}, {speed:,.0f} samples/s, {memory:,.0f} MB"
        )
        bad = [loss for loss in losses if not math.isfinite(loss)]
        if bad:
            raise Problem(f"before step {self.step} a loss was {bad[0]}")
        self.begin = time.perf_counter()
        return stop > 0

    @torch.no_grad()
    def evaluate(self):
        """Test on all ranks. Return how many samples were tested, and are right."""
        self.model.eval()  # no dropout; BatchNorm takes the averages that it has kept
        # With --shard ranks compute together, so all need the same number of batches.
        count = len(self.test_set)
        ranks = dist.get_world_size()
        places = torch.arange(dist.get_rank(), math.ceil(count / ranks) * ranks, ranks)
        batches = places.split(self.args.batch_size)
        loader = self.load(self.test_set, [batch % count for batch in batches], epoch=0)
        totals = torch.zeros(3, device=self.device)
        for batch, (images, labels) in zip(batches, loader):
            with self.autocast:
                outputs = self.model(images.to(self.device))
            outputs = outputs.float()  # bf16 would also round the counts below
            losses, correct = losses_and_correct(outputs, labels.to(self.device))
            real = (batch < count).to(self.device)  # the rest only makes the ranks even
            sums = [(losses * real).sum(), (correct & real).sum(), real.sum()]
            totals += torch.stack(sums)
        dist.all_reduce(totals)  # sums, not means: the parts may differ in size
        loss, right, tested = totals.tolist()
        found = {"test loss": loss / tested, "accuracy": right / tested}
        self.results |= found
        self.write(self.step, found)
        show(f"test: loss {loss / tested:.4f}, accuracy {right / tested:.2%}")
        return int(tested), int(right)

    def write(self, step, values):
        """Add values to metrics.jsonl and to TensorBoard, on rank 0."""
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, **values}), file=self.metrics, flush=True)
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def save(self):
        """Write checkpoint step-N, each rank a part. Every rank must call this."""
        folder = self.args.checkpoint_dir / f"step-{self.step}"
        unfinished = folder.with_suffix(".tmp")
        try:
            dcp.save({"training": self}, checkpoint_id=unfinished)
        except dcp.CheckpointException as error:  # on all ranks
            raise Problem(f"{folder} not written: {last_line(error)}") from None
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # one that could not be read
            unfinished.rename(folder)  # only now it counts
            Path(folder.parent, "latest").write_text(folder.name)
            for older in checkpoints(folder.parent)[2:]:
                shutil.rmtree(older, ignore_errors=True)
        show(f"saved: {folder}")

    def resume(self):
        """Resume from the newest checkpoint that can be read. All ranks call this."""
        folder = self.args.checkpoint_dir
        found = [checkpoints(folder)]
        dist.broadcast_object_list(found)  # all ranks take rank 0's list
        for path in found[0]:
            try:
                dcp.load({"training": self}, checkpoint_id=path)
                show(f"resumed: {path}")
                break
            except dcp.CheckpointException as error:  # on all ranks
                show(f"{path} cannot be read: {last_line(error)}")
        if found[0] and self.step == 0:
            raise Problem(f"no checkpoint fits: name a folder other than {folder}")
        if dist.get_rank() == 0:
            self.metrics = open_log(folder / "metrics.jsonl", self.step)
            self.board = SummaryWriter(folder, purge_step=self.step + 1)

    def state_dict(self):
        """Return what a checkpoint holds. With --shard, tensors are in parts."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "options": dict(self.options),
            "results": dict(self.results),
            "step": self.step,  # it tells the epoch, the place in it, and the rate
        }

    def load_state_dict(self, state):
        """Take over what a checkpoint holds, if it was begun with the same options."""
        for name, begun in state["options"].items():
            if begun != self.options[name]:
                other = f"{name} was {begun} where this training began"
                raise Problem(f"{other}: keep it, or name a new --checkpoint-dir")
        dcp_state.set_model_state_dict(self.model, state["model"])
        momentum = state["optimizer"]
        dcp_state.set_optimizer_state_dict(self.model, self.optimizer, momentum)
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
# Slurm, torchrun, Ctrl-C: save, the end is near.
SIGNALS = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
TIMEOUT = int(os.environ.get("DIST_TIMEOUT", 300))  # for collectives and data workers
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A checkpoint is refused if one of these was different.
FIXED = ["epochs", "data", "model", "global_batch_size", "lr", "warm_up", "clip"]
FIXED += ["seed", "precision", "shard", "max_steps"]


class Problem(Exception):
    """Stops the training with an error message instead of a traceback."""


def last_line(error):
    """Return the last line of an error: the cause, if other processes had it."""
    words = str(error).strip() or type(error).__name__
    return words.splitlines()[-1]


class Seeded(Dataset):
    """A data set whose random changes depend only on seed, epoch and sample.

    So they are the same on any rank, in any worker, and after a restart.
    """

    def __init__(self, dataset, seed, epoch):
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch

    def __getitem__(self, index):
        torch.default_generator.manual_seed(hash((self.seed, self.epoch, index)))
        try:
            return self.dataset[index]
        except Exception as error:  # of any type: a broken picture, or one too large
            files = getattr(self.dataset, "samples", None)  # ImageFolder has them
            name = files[index][0] if files else f"sample {index}"
            cause = last_line(traceback.format_exception_only(error)[-1])
            raise Problem(f"{name} cannot be read: {cause}") from None


def check_data(*sets):
    """Stop if ranks have other data than rank 0, such as a copy on their own node.

    It compares how many samples there are, and which: the indices of a split, names and
    labels of pictures, but not what is in the files. Every rank must call this.
    """
    own = []
    for part in sets:
        text = str([*getattr(part, "indices", [])])  # of a random split
        whole = getattr(part, "dataset", part)
        if isinstance(whole, datasets.DatasetFolder):
            # Without its folder, which may have another name on each node.
            text += str(whole.samples).replace(str(whole.root), "")
        digest = sha256(text.encode()).hexdigest()
        own.append(f"{len(part):,} samples with digest {digest[:8]}")
    copies = [None] * dist.get_world_size()
    dist.all_gather_object(copies, own)
    odd = [rank for rank, copy in enumerate(copies) if copy != copies[0]]
    if odd:
        here, there = [" and ".join(copies[rank]) for rank in (0, odd[0])]
        raise Problem(f"ranks {odd} have other data than rank 0: {there}, not {here}")


def wrap(model, args):
    """Return the model as it is trained, with DDP or in shards."""
    if args.shard:
        parts = [part for part in model.children() if list(part.parameters())]
        for part in [*parts, model]:  # each is gathered, used and freed by itself
            fully_shard(part)
            part.set_force_sum_reduction_for_comms(True)  # not all backends average
        return model
    if args.compile:  # its backward is one piece, during which DDP sends nothing
        model.compile()
    return DistributedDataParallel(model)


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


def compare(args):
    """Compare the losses with another run's. Return a claim, and whether it holds."""
    runs = []
    for folder in (args.checkpoint_dir, args.compare):
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        values = [json.loads(line) for line in lines]
        runs.append({x["step"]: x for x in values if "loss" in x})
    own, other = runs
    both = [step for step in own if step in other]
    gaps = [abs(own[step]["loss"] - other[step]["loss"]) for step in both]
    # Batches in other parts are rounded differently. Once that has switched one ReLU,
    # the difference grows, so only the first ten steps decide, and the rest is told.
    split = ("ranks", "accumulate")
    same = all(own[step][x] == other[step][x] for step in both for x in split)
    judged = gaps if same else gaps[:10]
    gap = max(judged, default=math.inf)
    limit = 1e-5 if args.precision == "fp32" else 5e-3
    claim = f"losses of {len(judged)} steps within {gap:.0e} of {args.compare}'s"
    claim += f" (limit {limit:.0e}), of {len(gaps)} within {max(gaps, default=0):.0e}"
    return claim, gap <= limit


def open_log(file, step):
    """Open a log to add to it. What came after this step is taken out of it first."""
    lines = file.read_text().splitlines() if file.exists() else []
    whole = [line for line in lines if line.endswith("}")]  # the last may be torn
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    file.with_suffix(".tmp").write_text("".join(f"{line}\n" for line in kept))
    file.with_suffix(".tmp").replace(file)
    return file.open("a")


def peak_memory(device):
    """Return how many MB this process has held at most, on a GPU if it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux: kB


def show(line):
    """Print a line, on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def lock_folder(folder):
    """Keep other jobs out of this folder for as long as rank 0 lives."""
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
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
    steps = [int(path.name[5:]) for path in paths if not path.suffix]
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


def kill_workers():
    """Kill data workers that are left. Python would wait for them, perhaps for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's would raise an error
    for worker in multiprocessing.active_children():
        worker.kill()


def name_rank():
    """Set torchrun's variables: srun has started this rank, or it is the only one."""
    given = os.environ
    ranks = given.get("SLURM_STEP_NUM_TASKS", "1")
    if ranks == "1":
        given.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WORLD_SIZE="1")
        return
    given.update(RANK=given["SLURM_PROCID"], LOCAL_RANK=given["SLURM_LOCALID"])
    ranks_here = given["SLURM_STEP_TASKS_PER_NODE"].split("(")[0]  # such as "4(x2)"
    given.update(LOCAL_WORLD_SIZE=ranks_here.split(",")[0], WORLD_SIZE=ranks)
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
    timeout = timedelta(seconds=TIMEOUT)
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()  # alone: no port
    dist.init_process_group(
        backend,
        timeout=timeout,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        store=store,
        device_id=device_id,
    )
    if args.precision == "auto":  # few CPUs can multiply in bf16, old GPUs simulate it
        args.precision = "fp32" if device.type == "cpu" else "bf16"
        old = device.type == "cuda" and not torch.cuda.is_bf16_supported(False)
        if old and not args.shard:
            args.precision = "fp16"
    batches = f"{args.global_batch_size} samples in {args.accumulate} batches a rank"
    show(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    show(f"{args.precision}, each step {batches}")
    try:
        if args.shard and backend == "gloo" and device.type != "cpu":
            raise Problem("gloo cannot shard on GPUs: --shard needs one for each rank")
        status = main(device, args)
    except Exception as error:  # on this rank alone, or on all of them
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's may raise here
            if dist.get_rank() != 0:
                time.sleep(3)  # if on all, rank 0 says it, and its end stops the job
            if isinstance(error, (ConnectionError, EOFError)):  # not of another rank
                error = Problem("a data worker has died: perhaps memory ran out")
            if isinstance(error, (Problem, OSError)):
                print(last_line(error), file=sys.stderr)
            else:
                traceback.print_exception(error)
        finally:
            kill_workers()
            os._exit(1)  # Python would wait for threads, perhaps for ever
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    kill_workers()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ["LOCAL_RANK"] != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    folder = os.environ.get("CHECKPOINT_DIR", f"runs/{Path(__file__).stem}")
    add("epochs", nargs="?", type=int, default=2, help="in total (2)")
    add("save_every", nargs="?", type=int, default=1, help="epochs (1)")
    add("--data", default="mnist", help="mnist, random, or a folder of images (mnist)")
    add("--model", choices=["net", "resnet18"], default="net", help="(net)")
    add("--checkpoint-dir", type=Path, default=folder, help=f"({folder})")
    add("--compare", type=Path, help="another run's folder: has it the same losses?")
    add("--global-batch-size", type=int, default=256, help="of all ranks (256)")
    add("--batch-size", type=int, default=64, help="of a rank at once, at most (64)")
    add("--lr", type=float, default=0.05, help="highest learning rate (0.05)")
    add("--warm-up", type=int, default=20, help="steps until then (20)")
    add("--clip", type=float, default=1.0, help="longest gradient (1.0)")
    add("--seed", type=int, default=0, help="for weights, order, augmentation (0)")
    add("--precision", choices=["auto", *PRECISIONS], default="auto", help="(auto)")
    add("--shard", action="store_true", help="FSDP2 instead of DDP")
    add("--compile", action="store_true", help="torch.compile")
    add("--workers", type=int, default=2, help="that read data for each rank (2)")
    add("--log-every", type=int, default=50, help="steps; signals wait for it (50)")
    add("--max-steps", type=int, default=10**9, help="of each epoch (all)")
    args = parser.parse_args()
    counts = [args.epochs, args.save_every, args.global_batch_size, args.batch_size]
    counts += [args.warm_up, args.log_every, args.max_steps, args.workers + 1]
    if min(*counts, args.lr, args.clip) <= 0:
        parser.error("all numbers must be more than 0; only --workers may be 0")
    ranks = int(os.environ["WORLD_SIZE"])
    most = math.ceil(args.global_batch_size / ranks)  # samples of a rank in a step
    args.accumulate = math.ceil(most / args.batch_size)
    if args.global_batch_size < ranks * args.accumulate:
        parser.error(f"{args.global_batch_size} samples are too few for {ranks} ranks")
    old = not hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    if args.shard and (old or args.compile or args.precision == "fp16"):
        parser.error("--shard needs torch 2.8, bf16 or fp32, and no --compile")
    return args


if __name__ == "__main__":
    if "RANK" not in os.environ:
        name_rank()
    sys.exit(run(parse_args()))
