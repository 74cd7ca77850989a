"""Lesson 12: a job that goes on where it was, after a failure or at a time limit.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  snapshot, restart, a signal before the end
Run:       scripts/multinode_setup_and_run.sh --max-restarts 3 \
day2/12_mnist_ddp_torchrun_elastic.py
Look for:  => starts: ..., images once an epoch: ... (limit ...), parameters ...: ok
Try next:  --crash-at-step 100; kill -9 a rank; kill -TERM one, then the same command.
"""

import argparse
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
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class Job:
    """A training, and all that it takes to go on from a snapshot of it."""

    def __init__(self, model, optimizer, scheduler, images):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.epoch = 0
        self.seen = 0  # images of this epoch that the ranks together have used
        self.ranks = [dist.get_world_size()]  # of each start
        self.losses = torch.empty(0)  # of all steps
        self.visits = torch.zeros(images, dtype=torch.int64)  # how often each was used

    def state_dict(self):
        """Return the content of a snapshot. Every rank must call this."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),  # the momentum
            "scheduler": self.scheduler.state_dict(),  # how far the warm-up is
            "random": gather(random_state()),  # of every rank: it decides dropout
            "progress": (self.epoch, self.seen, self.ranks),
            "results": (self.losses, self.visits),
        }

    def load_state_dict(self, state):
        """Go on from a snapshot, perhaps with another number of ranks."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        set_random_state(state["random"])
        self.epoch, self.seen, self.ranks = state["progress"]
        self.losses, self.visits = state["results"]


def train_one_epoch(model, loader, optimizer, scheduler, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(train_set, rank, world_size, device, args, told):
    """Train up to the end, or until told to stop. Return the job."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = DistributedDataParallel(model)
    settle(ddp_model, device)  # so that every start adds up in the same order
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # At first a large rate can diverge: begin with args.lr, then raise it.
    scheduler = LambdaLR(optimizer, warm_up(world_size, args))
    job = Job(model, optimizer, scheduler, len(train_set))
    resume(job, args)  # from the newest snapshot, if there is one
    while job.epoch < args.epochs:
        # All ranks shuffle alike. Of what is left of the epoch each takes every
        # world_size-th image, as many as it needs until the next snapshot.
        generator = torch.Generator().manual_seed(args.seed + job.epoch)
        order = torch.randperm(len(train_set), generator=generator)
        share = (len(order) - job.seen) // world_size
        sampler = order[job.seen + rank :: world_size][:share].tolist()
        sampler = sampler[: args.save_every * args.batch_size]
        loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
        batches = crash_as_told(progress(loader), job, args)
        losses = train_one_epoch(ddp_model, batches, optimizer, scheduler, device)
        job.losses = torch.cat([job.losses, mean_over_ranks(losses, world_size).cpu()])
        job.visits += count_visits(sampler, len(train_set), device)
        job.seen += len(sampler) * world_size
        if len(order) - job.seen < world_size:  # no image is left for every rank
            job.epoch += 1
            job.seen = 0
        save_snapshot(job, args)
        if anyone(told, device):  # then all ranks stop here, after the same step
            break
    return job


def main(device, args):
    """Run on every rank: train with snapshots, then again without. Compare."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    told = listen()  # notes the signals that say: the time limit is near
    train_set, test_set = load_mnist(args.data_dir)
    train_set = TensorDataset(*train_set[: args.images])  # the same images in each run
    job = train(train_set, rank, world_size, device, args, told)
    if job.epoch < args.epochs:
        if rank == 0:
            print("Stopped as told. The same command goes on from here.")
        return
    other = train_without_stop(train_set, rank, world_size, device, args)
    if rank == 0:
        write_scalars(job.losses, args.batch_size * world_size)
        print(f"test accuracy: {evaluate(job.model, test_set, device):.2%}")
        return finish(job, other, args)


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def random_state():
    """Return the states of this rank's random numbers: CPU, and accelerator if any."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state())
    return states


def set_random_state(states):
    """Go on with a rank's random numbers. states: of all the ranks that there were."""
    mine = states[dist.get_rank() % len(states)]
    torch.set_rng_state(mine[0])
    if torch.accelerator.is_available() and len(mine) > 1:
        torch.get_device_module().set_rng_state(mine[1])


def settle(ddp_model, device):
    """Have DDP settle in which order it adds gradients up: in its second backward.

    A job that goes on must add them up as the one that was stopped.
    """
    images = torch.zeros(1, 28, 28, dtype=torch.uint8, device=device)
    for _ in range(2):
        ddp_model(images).sum().backward()


def warm_up(world_size, args):
    """Return a function of the step: the factor of the learning rate, at first 1.

    It knows how many ranks there are now. LinearLR would take from a snapshot the rate
    for as many ranks as there were then.
    """

    def factor(step):
        return 1 + (world_size - 1) * min(1, step / args.warm_up)

    return factor


def crash_as_told(batches, job, args):
    """Yield the batches. At the first start, fail after the step --crash-at-step."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    for step, batch in enumerate(batches, start=len(job.losses) + 1):
        yield batch
        # Asked for the next batch: the step with this one is done.
        if step == args.crash_at_step and len(job.ranks) == 1 and not restarted:
            rank = dist.get_rank()
            if rank == args.crash_rank:
                raise RuntimeError(f"rank {rank} fails after step {step}, as told")


def count_visits(sampler, images, device):
    """Return how often the ranks use each image. Every rank must call this."""
    visits = torch.bincount(torch.tensor(sampler), minlength=images).to(device)
    dist.all_reduce(visits)
    return visits.cpu()


def listen():
    """Note SIGTERM and SIGUSR1 from now on. Return the list in which they are noted."""
    told = []

    def note(number, frame):
        told.append(number)  # acted on later, after the next snapshot

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
    return told


def anyone(told, device):
    """Return whether any rank was told to stop. Every rank must call this."""
    stop = torch.tensor(len(told), device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    return stop.item() > 0


def snapshot_path():
    """Return where the newest snapshot is."""
    return Path("runs", Path(__file__).stem, "snapshot.pt")


def kind_of(job, args):
    """Return what must be the same in a job that goes on from a snapshot."""
    numbers = (len(job.visits), args.batch_size, args.lr, args.warm_up, args.seed)
    return f"{job.model} {numbers}"


def save_snapshot(job, args):
    """Write a snapshot, if the losses are finite. Every rank must call this."""
    state = job.state_dict() | {"kind": kind_of(job, args)}
    first = dist.get_rank() == 0
    if not job.losses.isfinite().all():  # the same on all ranks
        sys.exit("The loss is not finite. Take a smaller --lr." if first else 1)
    if first:
        save(state, snapshot_path())
        where = f"in epoch {job.epoch} after {job.seen:,} images"
        loss = f"loss {job.losses[-1]:.4f}"
        print(f"step {len(job.losses)}: snapshot {where}, {loss}")


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
    temporary.replace(path)  # nobody ever sees half a file under this name


def resume(job, args):
    """Load the newest whole snapshot, if there is one. Every rank must call this."""
    rank = dist.get_rank()
    path = snapshot_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [load(path) if rank == 0 else None]
    dist.broadcast_object_list(found)  # rank 0 chooses for all
    state = found[0]
    if state is None:
        return
    if state.get("kind") != kind_of(job, args):
        todo = "Repeat those, or delete the file."
        sys.exit(1 if rank else f"{path} is of a job with other arguments. {todo}")
    job.load_state_dict(state)
    job.ranks = [*job.ranks, dist.get_world_size()]
    # The rate is still that for as many ranks as there were. Compute it again.
    job.scheduler.last_epoch -= 1
    job.scheduler.step()
    if rank == 0:
        where = f"in epoch {job.epoch} after {job.seen:,} images"
        print(f"start {len(job.ranks)}: goes on {where}")


def load(path):
    """Return the newest snapshot that is whole, or None where there is none."""
    damaged = (zipfile.BadZipFile, RuntimeError, EOFError, pickle.UnpicklingError)
    for file in (path, path.with_suffix(".before")):
        try:
            if zipfile.ZipFile(file).testzip() is None:  # torch.load misses a wrong bit
                # weights_only: runs no code that somebody has put into the file
                return torch.load(file, map_location="cpu", weights_only=True)
            problem = "a checksum is wrong"
        except FileNotFoundError:
            continue
        except damaged as error:
            problem = str(error).partition("\n")[0]
        print(f"{file} cannot be used: {problem}")
    return None


def train_without_stop(train_set, rank, world_size, device, args):
    """Train again, each epoch in one piece. Return the model. All ranks call this."""
    torch.manual_seed(args.seed)
    model = Net().to(device)
    ddp_model = DistributedDataParallel(model)
    settle(ddp_model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = LambdaLR(optimizer, warm_up(world_size, args))
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(len(train_set), generator=generator)
        sampler = order[rank::world_size][: len(order) // world_size].tolist()
        loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
        train_one_epoch(ddp_model, progress(loader), optimizer, scheduler, device)
    return model


def finish(job, other, args):
    """Write the model to runs/, delete the snapshots. Print the proof.

    If it does not hold, the snapshots stay: torchrun starts the job again, and without
    them it would train without a stop, and prove nothing about this one.
    """
    claim, holds = compare(job, other, args)
    folder = snapshot_path().parent
    torch.save(job.model.state_dict(), folder / "model.tmp")
    (folder / "model.tmp").replace(folder / "model.pt")
    if holds:
        for file in folder.glob("snapshot.*"):  # also what a kill in save has left
            file.unlink()
    else:
        print(f"{snapshot_path()} stays. Delete it to begin again.")
    return prove(claim, holds)


def compare(job, other, args):
    """Return the claim as a text: images once, the other model's parameters; if so.

    In each epoch, fewer images than there are ranks may be left out. With another
    number of ranks the steps are others, so the parameters cannot be the same.
    """
    once = (job.visits == args.epochs).sum().item()
    limit = len(job.visits) - args.epochs * (max(job.ranks) - 1)
    visits = f"images once an epoch: {once:,} of {len(job.visits):,} (limit {limit:,})"
    pairs = zip(job.model.parameters(), other.parameters(), strict=True)
    same = all(torch.equal(mine, its) for mine, its in pairs)
    parameters = "as without a stop" if same else "DIFFERENT"
    if len(set(job.ranks)) > 1:
        same = True
        parameters = f"not compared ({', '.join(map(str, job.ranks))} ranks)"
    claim = f"starts: {len(job.ranks)}, {visits}, parameters {parameters}"
    return claim, once >= limit and same


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--epochs", type=positive_int, default=1, help="epochs (1)")
    add("--batch-size", type=positive_int, default=64, help="per process (64)")
    add("--lr", type=positive_float, default=0.01, help="of one process (0.01)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--images", type=positive_int, default=60_000, help="training images (60000)")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    add("--warm-up", type=positive_int, default=8, help="steps of it (8)")
    add("--save-every", type=positive_int, default=50, help="steps per snapshot (50)")
    add("--crash-at-step", type=positive_int, help="have a rank fail after this step")
    add("--crash-rank", type=int, default=0, help="which one (0)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    ranks = int(os.environ["WORLD_SIZE"])
    if args.images < ranks:
        parser.error(f"images must be at least {ranks}: one for each of the ranks")
    return args


if __name__ == "__main__":
    args = parse_args()
    record(start)(args)  # tells torchrun which rank failed first, and why
