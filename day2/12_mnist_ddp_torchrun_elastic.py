"""Lesson 12: a job that goes on where it was, after a failure or at a time limit.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  snapshot, restart, a signal before the end
Run:       scripts/multinode_setup_and_run.sh --max-restarts 3 day2/12_mnist_ddp_torchrun_elastic.py
Look for:  => starts: 2, images once an epoch: 60,000 of 60,000, parameters: as without a stop
Try next:  --crash-at-step 100; kill -9 a rank; kill -TERM all of them, then the same command.
"""

import argparse
import os
import pickle
import signal
import sys
import tempfile
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR


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


def make_images(count):
    """Return made-up images, uint8 [N, 28, 28], and labels, int64 [N]."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=random)
    pictures = torch.randint(256, (10, 28, 28), generator=random)  # one for each label
    noise = torch.randint(256, (count, 28, 28), generator=random)
    return torch.where(noise < 128, pictures[labels], noise).byte(), labels


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


class Job:
    """A model in training, and all that it takes to go on from a snapshot."""

    def __init__(self, images, args):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)  # the same first weights on every rank
        self.model = DistributedDataParallel(Net().to(images.device))
        # In its second backward DDP settles in which order it adds the gradients up. Have that
        # behind us: a job that goes on must add as the one that was stopped.
        for _ in range(2):
            self.model(images[:1]).sum().backward()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        # New weights may not stand a large rate yet: raise it step by step. LinearLR would take
        # from a snapshot the rate for as many ranks as there were then.
        factor, warm_up = self.world_size, args.warm_up
        self.scheduler = LambdaLR(self.optimizer, lambda s: 1 + (factor - 1) * min(1, s / warm_up))
        self.epoch, self.seen, self.starts = 0, 0, 1  # seen: images of this epoch, by all ranks
        self.visits = images.new_zeros(len(images), dtype=torch.int32)
        self.history = []  # of each step: loss summed over the batch; batch size
        gpu = images.device.type != "cpu"
        self.generators = [torch, torch.get_device_module(images.device)] if gpu else [torch]
        # A snapshot is of use only to a job with the same model, data and arguments.
        self.kind = str((Net(), len(images), args.batch_size, args.lr, args.warm_up, args.seed))

    def step(self, images, labels):
        """Train on one batch."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        # No .item() here: the CPU would wait for the GPU in every step.
        size = loss.new_tensor(len(labels))
        self.history.append(torch.stack([loss.detach() * size, size]))

    def state_dict(self):
        """Return what a snapshot holds. Every rank must call this."""
        history, visits = torch.stack(self.history, dim=1), self.visits.clone()
        dist.all_reduce(history)
        dist.all_reduce(visits)
        state = {"history": history, "visits": visits, "random": [None] * self.world_size}
        dist.all_gather_object(state["random"], [x.get_rng_state() for x in self.generators])
        state |= {name: vars(self)[name] for name in ("epoch", "seen", "starts", "kind")}
        # The model within: DDP would put "module." before each name.
        state |= {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state):
        """Go on where the snapshot was taken, perhaps with another number of ranks."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scheduler.last_epoch -= 1
        self.scheduler.step()  # the rate for as many ranks as there are now
        self.epoch, self.seen, self.starts = state["epoch"], state["seen"], state["starts"] + 1
        random = state["random"][self.rank % len(state["random"])]
        for generator, its_state in zip(self.generators, random):
            generator.set_rng_state(its_state)
        # Rank 0 carries what all of them have counted until now.
        carry = int(self.rank == 0)
        self.visits += carry * state["visits"].to(self.visits.device)
        self.history = list((carry * state["history"]).to(self.visits.device).unbind(1))


def write_scalars(history):
    """Write the loss over the images seen to runs/, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, (loss, size) in zip(history[1].cumsum(0).int().tolist(), history.T.tolist()):
            writer.add_scalar("loss/train", loss / size, step)


def save(state, path):
    """Write a snapshot and keep the one before. At any moment a whole one is there."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        torch.save(state, temporary)
    except (OSError, RuntimeError):  # torch calls a full disk a RuntimeError
        temporary.unlink()
        sys.exit(f"{temporary} could not be written. Is the disk full?")
    if path.exists():
        path.replace(path.with_suffix(".before"))
    temporary.replace(path)  # at once: nobody ever sees half a file under this name


def load(path):
    """Return the newest snapshot that is whole, or None where there is none."""
    for file in (path, path.with_suffix(".before")):
        try:
            if zipfile.ZipFile(file).testzip() is None:  # torch.load overlooks a wrong bit
                return torch.load(file, map_location="cpu", weights_only=True)  # runs no code
            problem = "a checksum is wrong"
        except FileNotFoundError:
            continue
        except (zipfile.BadZipFile, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            problem = str(error).partition("\n")[0]
        print(f"{file} cannot be used: {problem}")
    return None


def anyone(told, device):
    """Return whether any rank was told to stop: all stop after the same step, or none."""
    stop = torch.tensor(len(told), device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    return stop.item() > 0


def train(job, images, labels, args, path=None, told=()):
    """Train to the end and return True, or False where told to stop. Without path save nothing."""
    crash = path and job.starts == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while job.epoch < args.epochs:
        # As DistributedSampler does, but of what the epoch has left: shuffle, then share out.
        random = torch.Generator().manual_seed(args.seed + job.epoch)
        rest = torch.randperm(len(images), generator=random)[job.seen :]
        mine = rest[job.rank :: job.world_size][: len(rest) // job.world_size].to(images.device)
        for indices in mine.split(args.batch_size) if len(mine) else ():
            job.step(images.index_select(0, indices), labels.index_select(0, indices))
            job.visits[indices] += 1
            job.seen += len(indices) * job.world_size
            step = len(job.history)
            if crash and step == args.crash_at_step and job.rank == args.crash_rank:
                raise RuntimeError(f"rank {job.rank} fails after step {step}, as it was told to")
            stop = path and step % 10 == 0 and anyone(told, images.device)  # to ask takes time
            if stop or (path and step % args.save_every == 0):
                state = job.state_dict()
                if not state["history"].isfinite().all():  # the same on all ranks
                    sys.exit(1 if job.rank else "The loss is not finite. Take a smaller --lr.")
                if job.rank == 0:
                    save(state, path)
                    print(f"step {step}: snapshot in epoch {job.epoch} after {job.seen:,} images")
            if stop:
                return False
        job.epoch, job.seen = job.epoch + 1, 0
    return True


def main(device, data, args):
    """Run on every rank: train with snapshots, then at a stretch without them. Compare."""
    images, labels = data[0].to(device), data[1].to(device)
    path, told = Path("runs", Path(__file__).stem, "snapshot.pt"), []
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # a time limit comes near, others need the node
        signal.signal(number, lambda *_: told.append(True))  # noted now, acted on after a step
    job = Job(images, args)
    snapshot = [load(path) if job.rank == 0 else None]
    dist.broadcast_object_list(snapshot)  # rank 0 chooses for all
    if snapshot[0]:
        if snapshot[0].get("kind") != job.kind:
            message = f"{path} is of a job with other arguments. Repeat those, or delete the file."
            sys.exit(1 if job.rank else message)
        job.load_state_dict(snapshot[0])
        if job.rank == 0:
            print(f"start {job.starts}: goes on in epoch {job.epoch} after {job.seen:,} images")
    if not train(job, images, labels, args, path, told):
        if job.rank == 0:
            print("Stopped as told. The same command goes on from here.")
        return
    result, other = job.state_dict(), Job(images, args)
    train(other, images, labels, args)
    if job.rank == 0:
        write_scalars(result["history"])
        torch.save(result["model"], path.with_name("model.pt"))
        for file in path.parent.glob("snapshot.*"):  # also what a kill in save has left
            file.unlink()
        pairs = zip(job.model.parameters(), other.model.parameters())
        same = "as without a stop" if all(torch.equal(*pair) for pair in pairs) else "DIFFERENT"
        once = f"{(result['visits'] == args.epochs).sum():,} of {len(images):,}"
        print(f"=> starts: {job.starts}, images once an epoch: {once}, parameters: {same}")


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
    parser.add_argument("--epochs", type=int, default=2, help="times through the data (2)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process (64)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate (0.005)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--warm-up", type=int, default=12, help="steps of it (12)")
    parser.add_argument("--made-up", type=int, metavar="N", help="use N made-up images, not MNIST")
    parser.add_argument("--save-every", type=int, default=50, help="steps between snapshots (50)")
    parser.add_argument("--crash-at-step", type=int, help="have a rank fail, to see what happens")
    parser.add_argument("--crash-rank", type=int, default=0, help="which one (0)")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name not in "seed crash_rank":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


if __name__ == "__main__":
    args = parse_args()
    data = make_images(args.made_up) if args.made_up else load_mnist(args.data_dir)
    record(start)(data, args)  # tells torchrun which rank failed first, and of what
