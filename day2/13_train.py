"""Lesson 13: the file you take home. One training script for every machine.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  resuming, bf16, accumulation, clipping, exact tests, --shard, --compare
Run:       scripts/multinode_setup_and_run.sh day2/13_train.py
Look for:  => 10,000 of 10,000 tested, ... right, ... by the saved model: ok
Try next:  kill -9 a rank, then the same command; --compare with another run's folder.
"""

# Started by python, torchrun, srun or sbatch: 13_train.py [EPOCHS [SAVE_EVERY]]. Yours
# are the first three functions. If you change only these, the rest still holds: one
# seed gives one training, on one process or many, interrupted or not.

import argparse
import fcntl
import json
import math
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
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
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
        to_tensor.insert(0, v2.Grayscale(3))
        transform = v2.Compose(to_tensor)
        train_set = datasets.MNIST(DATA, train=True, transform=transform)
        return train_set, datasets.MNIST(DATA, train=False, transform=transform), 10
    augment = [v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), *to_tensor]
    plain = [v2.Resize(72), v2.CenterCrop(64), *to_tensor]
    test = "val" if Path(args.data, "val").is_dir() else "test"
    train_set = datasets.ImageFolder(f"{args.data}/train", v2.Compose(augment))
    test_set = datasets.ImageFolder(f"{args.data}/{test}", v2.Compose(plain))
    if train_set.classes != test_set.classes:
        raise ValueError(f"train and {test} of {args.data} have different classes")
    return train_set, test_set, len(train_set.classes)


def loss_and_correct(outputs, labels):
    """Yours: the mean loss of a batch, and which of its samples are right."""
    return F.cross_entropy(outputs, labels), outputs.argmax(dim=1) == labels


class Seeded(Dataset):
    """A data set whose random changes depend on seed, epoch and sample, nothing else.

    So they are the same on any rank, in any worker, and after a restart.
    """

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = key
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
        try:
            return self.dataset[index]
        except (OSError, SyntaxError, ValueError) as error:  # a broken picture
            files = getattr(self.dataset, "samples", None)  # ImageFolder has them
            name = files[index][0] if files else f"sample {index}"
            raise BrokenSample(f"{name} cannot be read: {error}") from None


class Trainer:
    """A training: what it consists of, how it is saved and resumed, and its log."""

    def __init__(self, device, args):
        self.device = device
        self.args = args
        problem = None
        try:
            train_set, test_set, self.classes = build_data(args)
        except (OSError, RuntimeError, ValueError) as error:
            problem = f"rank {dist.get_rank()}: no data in {args.data}: {error}"
        stop_if(problem)  # perhaps on one node only
        self.train_set = Seeded(train_set, args.seed)
        self.test_set = Seeded(test_set, args.seed)
        args.options["samples"] = len(train_set)
        self.epoch_steps = len(train_set) // args.global_batch_size
        if args.max_steps:
            self.epoch_steps = min(self.epoch_steps, args.max_steps)
        if self.epoch_steps == 0:
            raise Problem(f"{len(train_set)} samples are less than a global batch")
        self.steps = args.epochs * self.epoch_steps
        torch.manual_seed(args.seed)  # the same first weights on every rank
        self.model = build_model(args, self.classes).to(device)
        self.wrapped = wrap(self.model, args)
        self.optimizer = torch.optim.SGD(self.model.parameters(), args.lr, momentum=0.9)
        # Weights and gradients stay fp32, what is multiplied is rounded.
        dtype = PRECISIONS[args.precision]
        rounded = dtype != torch.float32
        self.autocast = torch.autocast(device.type, dtype, enabled=rounded)
        fp16 = args.precision == "fp16"  # its small numbers would become 0: scale them
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.step = 0  # of the whole training
        self.accuracy = None
        self.losses = []  # of the steps that are not in the log yet
        self.told_to_stop = False
        for number in SIGNALS:
            signal.signal(number, self.note_signal)

    def note_signal(self, number, frame):
        """Note a signal. It may come in the middle of a step."""
        self.told_to_stop = True

    def load(self, dataset, batches):
        """Return an iterator over these batches of (epoch, index)."""
        loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.args.workers,
            pin_memory=self.device.type == "cuda",  # copied while the GPU computes
        )
        # Workers inherit this, so they read on when all processes of a job are told
        # to stop, and their rank still takes a step and saves.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        iterator = iter(loader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return iterator

    def rest_of_epoch(self):
        """Return this rank's batches from self.step to the end of its epoch.

        All ranks make the same shuffled list, and each step takes the next global batch
        of it. So a step uses the same samples on any number of ranks. What is left at
        the end, less than a global batch, is left out of this epoch.
        """
        epoch, done = divmod(self.step, self.epoch_steps)
        generator = torch.Generator().manual_seed(self.args.seed + epoch)
        order = torch.randperm(len(self.train_set), generator=generator)
        global_batches = order.split(self.args.global_batch_size)
        batches = []
        for global_batch in global_batches[done : self.epoch_steps]:
            own = global_batch[dist.get_rank() :: dist.get_world_size()]
            for batch in own.tensor_split(self.args.accumulate):
                batches.append([(epoch, index) for index in batch.tolist()])
        return batches

    def train(self):
        """Train to the end, or until a signal comes. Return whether it is the end."""
        stop = False
        while self.step < self.steps and not stop:
            self.begin = time.perf_counter()
            batches = self.load(self.train_set, self.rest_of_epoch())
            epoch_ends = False
            while not epoch_ends and not stop:
                self.train_step(islice(batches, self.args.accumulate))
                epoch_ends = self.step % self.epoch_steps == 0
                if epoch_ends or self.step % self.args.log_every == 0:
                    stop = self.log_steps()
            if epoch_ends:
                self.evaluate()
            epoch = self.step / self.epoch_steps
            if stop or epoch % self.args.save_every == 0 or self.step == self.steps:
                self.save()
        return self.step == self.steps

    def train_step(self, batches):
        """Take one step, with all batches that this rank has for it."""
        self.wrapped.train()
        # DDP divides by the number of ranks. So each sample counts the same:
        per_sample = dist.get_world_size() / self.args.global_batch_size
        shares = []  # of this rank's batches in the loss of the global batch
        for number, (images, labels) in enumerate(batches, start=1):
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            # For dropout: different on each rank, and the same again after a restart.
            seeds = (self.args.seed, self.step, number, dist.get_rank())
            torch.manual_seed(hash(seeds))
            # One message a step: ranks average in the backward of its last batch only.
            with averaging(self.wrapped, on=number == self.args.accumulate):
                with self.autocast:
                    loss, _ = loss_and_correct(self.wrapped(images), labels)
                share = len(labels) * per_sample
                self.scaler.scale(share * loss).backward()  # gradients add up
            shares.append(share * loss.detach())  # no .item(): it waits for the GPU
        self.scaler.unscale_(self.optimizer)  # clip the gradients as they are
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.args)
        self.scaler.step(self.optimizer)  # fp16: not if a gradient is infinite
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(torch.stack(shares).sum())
        self.step += 1

    def log_steps(self):
        """Log all steps since the last line. Return whether a rank was told to stop."""
        stop = torch.tensor(float(self.told_to_stop), device=self.device)
        sums = torch.stack([*self.losses, stop])
        dist.all_reduce(sums)  # over the ranks, in place
        *losses, stop = (sums / dist.get_world_size()).tolist()  # waits for the device
        seconds = time.perf_counter() - self.begin
        for step, loss in enumerate(losses, start=self.step - len(losses)):
            rate = learning_rate(step, self.steps, self.args)
            self.write({"loss": loss, "rate": rate}, step + 1)
        speed = len(losses) * self.args.global_batch_size / seconds
        memory = peak_memory(self.device)
        self.write({"samples/s": speed, "MB": memory}, self.step)
        show(
            f"step {self.step:,} of {self.steps:,}: loss {losses[-1]:.4f}, "
            f"rate {rate:.4f}, {speed:,.0f} samples/s, {memory:,.0f} MB"
        )
        if not math.isfinite(sum(losses)):
            raise Problem(f"step {self.step}: the loss is {losses[-1]}")  # on all ranks
        self.losses = []
        self.begin = time.perf_counter()
        return stop > 0

    @torch.inference_mode()
    def evaluate(self):
        """Test on all ranks. Return how many samples were tested.

        Every rank takes equally many: with --shard all must compute together.
        """
        self.share_buffers()
        self.model.eval()  # no dropout; BatchNorm takes the averages that it has kept
        count = len(self.test_set)
        ranks = dist.get_world_size()
        places = torch.arange(dist.get_rank(), math.ceil(count / ranks) * ranks, ranks)
        batches = places.split(self.args.batch_size)
        keys = [[(0, place % count) for place in batch.tolist()] for batch in batches]
        totals = torch.zeros(3, device=self.device)
        loader = self.load(self.test_set, keys)
        for (images, labels), batch in zip(loader, batches):
            with self.autocast:
                outputs = self.model(images.to(self.device))
            real = int((batch < count).sum())  # the rest only makes the ranks even
            if real:
                labels = labels[:real].to(self.device)
                loss, correct = loss_and_correct(outputs[:real], labels)
                sums = [loss * real, correct.sum(), torch.full_like(loss, real)]
                totals += torch.stack(sums)
        dist.all_reduce(totals)  # sums, not means: the parts may differ in size
        loss, correct, tested = totals.tolist()
        self.accuracy = correct / tested
        self.write({"test loss": loss / tested, "accuracy": self.accuracy}, self.step)
        show(f"test: loss {loss / tested:.4f}, accuracy {self.accuracy:.2%}")
        return int(tested)

    def open_log(self, size):
        """Go on with metrics.jsonl after so many bytes, and with TensorBoard."""
        if dist.get_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter  # only rank 0 needs it

            folder = self.args.checkpoint_dir
            self.metrics = Path(folder, "metrics.jsonl").open("a")  # noqa: SIM115
            self.metrics.truncate(size)
            self.board = SummaryWriter(folder, purge_step=self.step + 1)

    def write(self, values, step):
        """Add values to metrics.jsonl and to TensorBoard, on rank 0."""
        if dist.get_rank() == 0:
            split = [dist.get_world_size(), self.args.accumulate]
            line = {"step": step, "ranks, accumulate": split, **values}
            print(json.dumps(line), file=self.metrics, flush=True)
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def share_buffers(self):
        """Give all ranks the averages of BatchNorm that rank 0 has kept."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def state_dict(self):
        """Return the tensors of model and optimizer, with --shard this rank's part."""
        self.share_buffers()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self):
        """Write checkpoint step-N, each rank a part. Every rank must call this."""
        folder = self.args.checkpoint_dir / f"step-{self.step}"
        unfinished = folder.with_suffix(".tmp")
        try:
            dcp.save(self.state_dict(), checkpoint_id=unfinished)
        except dcp.CheckpointException as error:  # on all ranks
            reason = str(error).splitlines()[-1]
            raise Problem(f"{folder} could not be written: {reason}") from None
        if dist.get_rank() == 0:
            record = {
                "step": self.step,
                "accuracy": self.accuracy,
                "scaler": self.scaler.state_dict(),
                "ranks": dist.get_world_size(),
                "metrics": self.metrics.tell(),
                "options": self.args.options,
            }
            Path(unfinished, "record.json").write_text(json.dumps(record))
            if folder.exists():  # one that could not be read
                folder.rename(folder.with_suffix(f".broken-{time.time_ns()}"))
            unfinished.rename(folder)  # only now it counts
            Path(folder.parent, "latest.tmp").write_text(folder.name)
            Path(folder.parent, "latest.tmp").replace(folder.parent / "latest")
            for older in checkpoints(folder.parent)[2:]:
                shutil.rmtree(older)
        show(f"saved: {folder}")

    def resume(self):
        """Go on from the newest readable checkpoint. Every rank must call this."""
        folders = gather(checkpoints(self.args.checkpoint_dir))[0]  # rank 0's list
        for folder in folders:
            record, problem = read_record(folder, self.args)
            stop_if(problem)
            state = self.state_dict()
            problem = None if record else "its record"
            try:
                dcp.load(state, checkpoint_id=folder)
            except dcp.CheckpointException as error:
                problem = str(error).splitlines()[-1]
            problems = [words for words in gather(problem) if words]
            if problems:
                show(f"{folder} cannot be read: {problems[0]}")
                continue
            model, optimizer = state.values()
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=model,
                optim_state_dict=optimizer,
            )
            self.scaler.load_state_dict(record["scaler"])
            self.step = record["step"]
            self.accuracy = record["accuracy"]
            show(f"resumed: {folder}, which {record['ranks']} ranks have written")
            return record["metrics"]
        if folders:
            folder = self.args.checkpoint_dir
            raise Problem(f"no checkpoint in {folder} can be read: name another folder")
        return 0  # bytes of metrics.jsonl


def main(device, args):
    """Run on every rank, as run calls it: resume, train, save, test what was saved."""
    lock = lock_folder(args.checkpoint_dir)  # held until this process ends
    trainer = Trainer(device, args)
    trainer.open_log(trainer.resume())
    if trainer.step == trainer.steps:
        show("this training has ended; to train anew, name another --checkpoint-dir")
    if not trainer.train():
        show("Stopped as told. The same command goes on from here.")
        return 0
    # A model that fits on no device: use its checkpoints, and delete what follows.
    file = args.checkpoint_dir / "model.pt"
    if dist.get_rank() == 0:  # from the parts, one file for any number of ranks
        dcp_to_torch_save(checkpoints(args.checkpoint_dir)[0], file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
    dist.barrier()
    trained = trainer.accuracy
    weights = torch.load(file, map_location=device)["model"]
    trainer.model = build_model(args, trainer.classes).to(device)
    trainer.model.load_state_dict(weights)
    tested = trainer.evaluate()  # the saved model, as somebody who loads it later
    os.close(lock)
    if dist.get_rank() == 0:
        trainer.board.close()
        print(f"to use it: model.load_state_dict(torch.load('{file}')['model'])")
        if args.compare:
            return prove(*compare(args))
        count = len(trainer.test_set)
        claim = f"{tested:,} of {count:,} tested, {trained:.2%} right"
        claim += f", {trainer.accuracy:.2%} by the saved model"
        same = abs(trainer.accuracy - trained) < 5e-4  # rounding may decide a few
        return prove(claim, tested == count and same)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
SIGNALS = [signal.SIGUSR1, signal.SIGTERM]  # Slurm, torchrun: save, the end is near
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}  # changes losses by less
# A checkpoint is refused if one of these was different.
FIXED = ["epochs", "data", "model", "global_batch_size", "lr", "warm_up", "clip"]
FIXED += ["seed", "precision", "shard", "max_steps"]


class Problem(Exception):
    """What ends the training with one sentence instead of a traceback."""


class BrokenSample(Exception):
    """A sample that cannot be read. Only one rank may have met it."""


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def show(line):
    """Print a line, on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stop_if(problem):
    """Stop all ranks if one of them has a problem. Every rank must call this."""
    for words in gather(problem):
        if words:
            raise Problem(words)


def lock_folder(folder):
    """Keep other jobs out of this folder. Every rank must call this."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    taken = False
    if dist.get_rank() == 0:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # others: this disk has no locks
            taken = True
    stop_if(f"another job is training in {folder}" if taken else None)
    return lock


def checkpoints(folder):
    """Return the complete checkpoints in this folder, the newest first."""
    steps = [
        int(path.name[5:]) for path in folder.glob("step-[0-9]*") if not path.suffix
    ]
    return [folder / f"step-{step}" for step in sorted(steps, reverse=True)]


def read_record(folder, args):
    """Return what belongs to a checkpoint, or None, and why it must not be resumed."""
    try:
        record = json.loads(Path(folder, "record.json").read_text())
    except (OSError, ValueError):
        return None, None
    for name, begun in record["options"].items():
        now = args.options[name]
        if begun != now:
            other = f"{folder.parent} was begun with {name} {begun}, not {now}"
            return record, f"{other}: name another --checkpoint-dir"
    return record, None


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
        model.set_requires_gradient_sync(on)  # FSDP2's way to say it
    elif not on:
        return model.no_sync()
    return nullcontext()


def learning_rate(step, steps, args):
    """Return the rate of this step: up to args.lr, then down to 0 along a cosine."""
    warm_up = min(1, (step + 1) / args.warm_up)
    return args.lr * warm_up * (1 + math.cos(math.pi * step / steps)) / 2


def peak_memory(device):
    """Return how many MB this process has held at most, on a GPU if it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux: kB


def compare(args):
    """Compare the losses with another run's. Return a claim, and whether it holds."""
    own = read_losses(args.checkpoint_dir)
    other = read_losses(args.compare)
    both = sorted(own.keys() & other.keys())
    # If other numbers of ranks divide a batch, sums are rounded differently. Once that
    # has switched one ReLU, the difference grows: compare 10 steps from there on.
    different = [step for step in both if own[step][1] != other[step][1]]
    last = different[0] + 9 if different else math.inf
    gaps = [abs(own[step][0] - other[step][0]) for step in both if step <= last]
    gap = max(gaps, default=math.inf)
    limit = ROUNDING[args.precision]
    claim = f"losses of {len(gaps)} steps within {gap:.0e} of {args.compare}'s"
    return f"{claim} (limit {limit:.0e})", gap <= limit


def read_losses(folder):
    """Return {step: (loss, [ranks, accumulate])} of a run."""
    with Path(folder, "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    return {
        x["step"]: (x["loss"], x["ranks, accumulate"]) for x in lines if "loss" in x
    }


def choose_device(local_rank, local_world_size):
    """Return this rank's device, and the backend that connects such devices."""
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


def choose_precision(device):
    """Return the name of the precision that pays on this device."""
    if device.type == "cpu":
        return "fp32"  # few CPUs can multiply in bf16; on the others it is slower
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        return "fp16"  # older GPUs only imitate bf16
    return "bf16"


def name_rank():
    """Set torchrun's variables: srun has started this rank, or it is the only one."""
    given = os.environ
    tasks = given.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1":
        given.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WORLD_SIZE="1")
        given.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port
        return
    command = ["scontrol", "show", "hostnames", given["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    port = 20_000 + (int(given["SLURM_JOB_ID"]) + int(given["SLURM_STEP_ID"])) % 10_000
    given.update(RANK=given["SLURM_PROCID"], LOCAL_RANK=given["SLURM_LOCALID"])
    ranks_here = (
        given["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0]
    )  # of "4(x2)"
    given.update(LOCAL_WORLD_SIZE=ranks_here, WORLD_SIZE=tasks)
    given.update(MASTER_ADDR=hosts.split()[0], MASTER_PORT=str(port))
    if "SLURM_GPUS_ON_NODE" in given:  # though this rank may see one only
        given.setdefault("GPUS_ON_NODE", given["SLURM_GPUS_ON_NODE"])


def run(args):
    """Run as one rank: join the process group, call main, leave. Return the status."""
    warnings.filterwarnings("ignore", "TypedStorage")  # torch 2.6 about itself
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(int(os.environ["LOCAL_RANK"]), ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 300)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects at once
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if args.precision == "auto":
        args.precision = choose_precision(device)
    args.options = {name: getattr(args, name) for name in FIXED}
    ranks = dist.get_world_size()
    batches = f"{args.global_batch_size} samples in {args.accumulate} batches a rank"
    show(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    show(f"{args.precision}, each step {batches}")
    try:
        status = main(device, args)
    except Problem as error:  # on all ranks at the same time
        if dist.get_rank() == 0:
            print(error, file=sys.stderr)
        dist.barrier()  # the first rank that ends may end the others
        os._exit(1)  # Python would wait for threads and workers, perhaps for ever
    except (BrokenSample, OSError) as error:  # perhaps on this rank alone
        print(str(error).strip().splitlines()[-1], file=sys.stderr)
        os._exit(1)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ["LOCAL_RANK"] != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    folder = os.environ.get("CHECKPOINT_DIR", f"runs/{Path(__file__).stem}")
    add("epochs", nargs="?", type=int, default=2, help="in all (2)")
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
    add("--max-steps", type=int, help="end each epoch after so many")
    args = parser.parse_args()
    numbers = [args.epochs, args.save_every, args.batch_size, args.log_every]
    if min(*numbers, args.warm_up, args.global_batch_size) < 1:
        parser.error("numbers of epochs, steps and samples must be at least 1")
    if min(args.lr, args.clip) <= 0:
        parser.error("--lr and --clip must be more than 0; --clip inf clips nothing")
    ranks = int(os.environ["WORLD_SIZE"])
    most = math.ceil(args.global_batch_size / ranks)  # samples of a rank in a step
    args.accumulate = math.ceil(most / args.batch_size)
    if args.global_batch_size < ranks * args.accumulate:
        parser.error(f"{args.global_batch_size} samples are too few for {ranks} ranks")
    if args.shard and (args.compile or args.precision == "fp16"):
        parser.error("--shard goes with bf16 or fp32, and without --compile")
    if args.shard and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        parser.error(f"--shard needs torch 2.8 or newer, this is {torch.__version__}")
    return args


if __name__ == "__main__":
    if "RANK" not in os.environ:
        name_rank()
    sys.exit(run(parse_args()))
