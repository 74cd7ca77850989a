"""Lesson 11: data too large for memory, streamed from disk chunk by chunk.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  IterableDataset, worker, shuffle buffer
Run:       scripts/multinode_setup_and_run.sh day2/11_mnist_ddp_pt_multinode_streaming.py
Look for:  => 59,904 of 60,000 images once an epoch, losses within 0e+00 of those from memory
Try next:  --workers 2; --no-shuffle; a file of 20 copies with --stream-only: watch the memory.
"""

import argparse
import os
import resource
import sys
import time
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import h5py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm


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


def batches(images, labels, sampler, batch_size, max_steps):
    """Yield images and labels batch by batch, in the sampler's order."""
    order = torch.tensor(list(sampler), device=images.device)
    hidden = os.environ.get("RANK", "0") != "0" or None  # None: shown on a terminal only
    for indices in tqdm(order.split(batch_size)[:max_steps], disable=hidden, leave=False):
        yield images.index_select(0, indices), labels.index_select(0, indices)


def usable(path):
    """Return whether the file at this path holds what the lesson reads."""
    try:
        with h5py.File(path) as file:
            images, labels = file["images"], file["labels"]
            return (
                images.shape == (*labels.shape, 28, 28) and images.chunks and "test_images" in file
            )
    except (OSError, KeyError):
        return False


class ChunkStream(IterableDataset):
    """Images, uint8 [M, 28, 28], and labels, int64 [M], from an HDF5 file, some chunks at a time.

    Think of the file's chunks laid in a row, in an order that is new in each epoch. Each rank has
    an equal part of the row, and each of its workers a part of that. A worker reads some chunks at
    once, the shuffle buffer, and gives them out in random order: M images, a few batches.
    """

    def __init__(self, rank, world_size, args):
        with h5py.File(args.file) as file:  # and closed: an open file cannot go to a worker
            self.count, self.chunk_size = len(file["labels"]), file["images"].chunks[0]
        # The number of batches is the same on all ranks. With unequal numbers DDP would hang.
        self.steps = self.count // (world_size * args.batch_size)
        self.steps = min(self.steps, args.max_steps or self.steps)
        self.rank, self.args = rank, args
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # the workers see it too

    def plan(self, worker, workers):
        """Yield what a worker reads at once: the numbers of the images, and their new order."""
        random = torch.Generator().manual_seed(self.args.seed + int(self.epoch))
        size, shuffle = self.args.batch_size, self.args.shuffle
        shuffled = (lambda n: torch.randperm(n, generator=random)) if shuffle else torch.arange
        begins = shuffled(-(-self.count // self.chunk_size)) * self.chunk_size
        sizes = (self.count - begins).clamp(max=self.chunk_size)  # the last chunk may be smaller
        ends = sizes.cumsum(0)  # where in the row each chunk ends
        shift = begins + sizes - ends  # from a place in the row to the number of the image there
        # This worker's part of the row, and how much of it to read at once: whole batches.
        first, last = (
            (self.rank * self.steps + self.steps * (worker + i) // workers) * size for i in (0, 1)
        )
        buffer = max(1, self.args.buffer * self.chunk_size // size) * size
        for place in range(first, last, buffer):
            places = torch.arange(place, min(place + buffer, last))
            numbers = places + shift[torch.searchsorted(ends, places, right=True)]
            yield numbers, shuffled(len(numbers))

    def __iter__(self):
        """Read a worker's part of the epoch."""
        info = get_worker_info()
        with h5py.File(self.args.file) as file:  # opened by the process that reads
            for numbers, order in self.plan(*(info.id, info.num_workers) if info else (0, 1)):
                # Neighbours are read together: a chunk at a time, not an image at a time.
                cuts = (numbers.diff() != 1).nonzero()[:, 0] + 1
                runs = [slice(run[0], run[-1] + 1) for run in numbers.tensor_split(cuts)]
                yield [
                    torch.cat([torch.from_numpy(data[run]) for run in runs]).index_select(0, order)
                    for data in (file["images"], file["labels"])
                ]

    def order(self):
        """Return the numbers of the images in the order in which this rank gets them."""
        workers = max(1, self.args.workers)
        parts = [
            [numbers[order] for numbers, order in self.plan(w, workers)] for w in range(workers)
        ]
        # The loader takes from each worker in turn.
        return torch.cat([x for row in zip_longest(*parts) for x in row if x is not None])


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


def evaluate(model, images, labels):
    """Return the share of images that the model gets right, from 0 to 1, over all ranks' parts."""
    right = [model(x).argmax(1) for x in images.split(1000)]
    counts = torch.stack([(torch.cat(right) == labels).sum(), labels.new_tensor(len(labels))])
    dist.all_reduce(counts)  # sums, not shares: the parts may differ in size
    return (counts[0] / counts[1]).item()


def write_scalars(history):
    """Write the loss over the images seen to runs/, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, (loss, size) in zip(history[1].cumsum(0).int().tolist(), history.T.tolist()):
            writer.add_scalar("loss/train", loss / size, step)


def peak_memory():
    """Return the most memory that this process has held, and the largest worker that has ended."""
    megabyte = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, kilobytes elsewhere
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    rank, worker = (resource.getrusage(kind).ru_maxrss / megabyte for kind in kinds)
    return f"at most {rank:,.0f} MB in memory, a worker {worker:,.0f} MB"


def train(name, source, device, args):
    """Train on the batches of source(epoch). Return the model and the history of all steps."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = DistributedDataParallel(Net().to(device))  # averages the gradients during backward
    factor = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * factor, momentum=0.9)
    # New weights may not stand a large rate yet: start at 1 / factor of it, then raise it.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / factor, total_iters=args.warm_up)
    histories = []
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        histories.append(train_one_epoch(model, optimizer, scheduler, source(epoch)))
        dist.all_reduce(histories[-1])  # losses and images of all ranks, step by step
        # Reading the sums waits for the device. Only then is it fair to read the clock.
        loss, count = histories[-1].sum(1).tolist()
        speed = count / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"{name}, epoch {epoch}: loss {loss / count:.4f}, {speed:,.0f} images/s")
    return model.module, torch.cat(histories, dim=1)


def main(device, args):
    """Run on every rank: train from the file, then from memory in the same order. Compare."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = ChunkStream(rank, world_size, args)
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    loader = DataLoader(stream, batch_size=None, pin_memory=device.type == "cuda", **options)

    def from_file(epoch):
        stream.epoch.fill_(epoch)  # without this every epoch has the same order
        for images, labels in loader:  # the workers read on while this rank computes
            for x, y in zip(images.split(args.batch_size), labels.split(args.batch_size)):
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def from_memory(epoch):
        stream.epoch.fill_(epoch)
        return batches(*data, stream.order().tolist(), args.batch_size, args.max_steps)

    def read(*names, part=slice(None)):
        with h5py.File(args.file) as file:
            return [torch.from_numpy(file[name][part]).to(device) for name in names]

    model, history = train("streamed", from_file, device, args)
    loader = None  # ends the workers
    mine = slice(rank, None, world_size)
    accuracy = evaluate(model, *read("test_images", "test_labels", part=mine))
    if rank == 0:
        write_scalars(history)
        print(f"streamed: {accuracy:.2%} of the test images right, {peak_memory()}")
    visits = stream.order().to(device).bincount(minlength=stream.count)
    dist.all_reduce(visits)
    proof = f"=> {(visits == 1).sum():,} of {stream.count:,} images once an epoch"
    if not args.stream_only:
        data = read("images", "labels")
        _, expected = train("from memory", from_memory, device, args)
        if rank == 0:
            print(f"from memory: {peak_memory()}")
        gap = (history[0] / history[1] - expected[0] / expected[1])[:20].abs().max()
        proof += f", losses within {gap:.0e} of those from memory"
    if rank == 0:
        print(proof)


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
    parser.add_argument("--max-steps", type=int, help="end an epoch after this many steps")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--warm-up", type=int, default=12, help="steps of it (12)")
    parser.add_argument("--file", type=Path, help="made by create_mnist_h5.py (data/mnist.h5)")
    parser.add_argument("--workers", type=int, default=1, help="processes that read, a rank (1)")
    parser.add_argument("--buffer", type=int, default=8, help="chunks shuffled together (8)")
    parser.add_argument("--no-shuffle", dest="shuffle", action="store_false")
    parser.add_argument("--stream-only", action="store_true", help="do not train from memory too")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    for name, value in vars(args).items():
        any_number = name in "seed workers shuffle stream_only"
        if isinstance(value, int | float) and not value > 0 and not any_number:
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    args.file = args.file or args.data_dir / "mnist.h5"
    if not usable(args.file):
        hint = "python day2/create_mnist_h5.py --force"
        parser.error(f"{args.file} is missing, damaged or of another kind. Make it: {hint}")
    if ChunkStream(0, int(os.environ["WORLD_SIZE"]), args).steps == 0:
        parser.error(f"{args.file} has not one batch for each rank. Take a smaller --batch-size.")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
