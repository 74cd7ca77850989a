"""Lesson 11: data too large for memory, streamed from disk chunk by chunk.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  IterableDataset, worker, shuffle buffer
Run:      scripts/multinode_setup_and_run.sh day2/11_mnist_ddp_pt_multinode_streaming.py
Look for:  => ... images once an epoch (limit ...), ..., the same after ... middle: ok
Try next:  --workers 2; --buffer 1: which claim fails now, and why?
"""

import argparse
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from hashlib import sha256
from itertools import islice
from multiprocessing.connection import Listener
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info


class ChunkStream(IterableDataset):
    """Shuffled batches from the datasets images and labels of a chunked HDF5 file.

    Each worker of each rank takes the same number of chunks, reads buffer_chunks at a
    time and mixes their samples. The rest sits out this epoch. transform gets a batch.
    """

    def __init__(
        self, path, batch_size, rank, world_size, seed, buffer_chunks, transform=None
    ):
        self.path = path
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.buffer_chunks = buffer_chunks
        self.transform = transform
        self.begin = torch.tensor([0, 0]).share_memory_()  # workers see it change
        with h5py.File(path) as file:  # closed again: each worker opens its own
            images = file["images"]
            if images.chunks is None or len(images) != len(file["labels"]):
                raise ValueError("it must have images in chunks, and as many labels")
            self.chunk_size = images.chunks[0]
            self.chunks = len(images) // self.chunk_size
            begins = range(0, self.chunks * self.chunk_size, self.chunk_size)
            self.bounds = [*begins, len(images)]  # the last chunk may be longer

    def set_epoch(self, epoch, done=0):
        """On every rank: choose an epoch's order, less the batches that it has done."""
        self.begin.copy_(torch.tensor([epoch, done]))

    def share(self, workers):
        """Return how many chunks, and whole batches, each worker of each rank gets."""
        # The same number for each: if a rank had one batch more, DDP would hang.
        chunks = self.chunks // (self.world_size * workers)
        return chunks, chunks * self.chunk_size // self.batch_size

    def __iter__(self):
        """Yield the batches of one worker."""
        epoch, done = self.begin.tolist()
        info = get_worker_info()
        workers = info.num_workers if info else 1  # no info: the rank itself reads
        # Batches come from the workers in turn, after a restart from the next one's.
        worker = (info.id + done) % workers if info else 0
        chunks, batches = self.share(workers)
        if batches == 0:
            raise ValueError(f"{self.path} has not one batch for each worker")
        # The same seed on all ranks: all must agree on the order of the chunks.
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.chunks, generator=generator)
        first = chunks * (self.rank * workers + worker)
        own = order[first : first + chunks]
        skipped = len(range(worker, done, workers))
        stream = self.mix(own, generator, skipped)
        for batch in islice(stream, batches - skipped):
            yield self.transform(*batch) if self.transform else batch

    def mix(self, order, generator, skipped):
        """Read a few of these chunks at a time. Yield batches of them, shuffled.

        The first ones are skipped, unread if a buffer has a whole number of batches.
        """
        rest = 0  # samples that the mix before has left at the front of the buffers
        size = (self.buffer_chunks + 1) * self.chunk_size + self.batch_size
        with h5py.File(self.path, rdcc_nbytes=0) as file:  # no cache: read once
            sources = file["images"], file["labels"]
            buffers = [np.empty((size, *x.shape[1:]), x.dtype) for x in sources]
            tensors = [torch.from_numpy(buffer) for buffer in buffers]  # same memory
            for chunks in order.split(self.buffer_chunks):
                parts = [self.bounds[chunk : chunk + 2] for chunk in chunks.tolist()]
                begin = rest
                count = rest + sum(last - first for first, last in parts)
                permutation = torch.randperm(count, generator=generator)
                batches, rest = divmod(count, self.batch_size)
                if rest == 0 and skipped >= batches:
                    skipped -= batches
                    continue
                for first, last in parts:
                    end = begin + last - first
                    for source, buffer in zip(sources, buffers):
                        buffer[begin:end] = source[first:last]
                    begin = end
                for indices in permutation.split(self.batch_size)[skipped:batches]:
                    # This copies whole rows, which indexing copies byte by byte.
                    yield [tensor.index_select(0, indices) for tensor in tensors]
                skipped = max(0, skipped - batches)
                for tensor in tensors:
                    tensor[:rest] = tensor.index_select(0, permutation[count - rest :])


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


def train(stream, device, args):
    """Train a new model on all ranks. Return it and the losses of all steps."""
    world_size = dist.get_world_size()
    global_batch_size = args.batch_size * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model copies rank 0's parameters to all: the seed only makes runs comparable.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model, whose parameters it shares, is on this rank's device.
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # None: the stream yields batches. Its workers read ahead while this rank trains.
    # One that cannot send prints why and lives on: only a timeout ends the wait for it.
    options = {"persistent_workers": args.workers > 0, "timeout": args.limit}
    loader = DataLoader(stream, None, num_workers=args.workers, **options)
    losses = []
    used = []
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = noted(islice(loader, args.max_steps), used)  # for the proof
        epoch_losses = train_one_epoch(ddp_model, batches, optimizer, device)
        dist.all_reduce(epoch_losses)  # the sum over the ranks, in place
        losses.append(epoch_losses / world_size)
        images_seen = len(epoch_losses) * global_batch_size
        loss = losses[-1].mean().item()  # waits for the device: only now read the clock
        speed = images_seen / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")
    return model, torch.cat(losses), gather(used)


def main(device, args):
    """Run on every rank, as start calls it: train, evaluate, report."""
    make_repeatable()  # only because we compare runs
    check_copies(args.file, contents(args.file))
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    stream = ChunkStream(
        args.file, args.batch_size, rank, world_size, args.seed, args.buffer
    )
    model, losses, used = train(stream, device, args)
    if rank == 0:
        write_scalars(losses, args.batch_size * world_size)
        print(f"test accuracy: {evaluate(model, read_file(args, 'test_'), device):.2%}")
        return prove(*check_stream(stream, used, losses, device, args))


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def noted(batches, used):
    """Yield the batches, and add a digest of each image to the list used."""
    for images, labels in batches:
        used += digests(images, labels)
        yield images, labels


def digests(images, labels):
    """Return 32 bytes for each image and its label, which only a copy shares."""
    both = zip(images.numpy(), labels.numpy())
    return [sha256(image.tobytes() + label.tobytes()).digest() for image, label in both]


def check_stream(stream, used, losses, device, args):
    """Compare what was used with the file. Return the claim, and whether it holds.

    used[rank] has the digests of a rank's images, in the order in which it used them.
    """
    train_set = read_file(args)
    in_file = digests(*train_set.tensors)
    # If the file has copies of an image, all of them get the number of the last one.
    number_of = {digest: number for number, digest in enumerate(in_file)}
    copies = Counter(number_of[digest] for digest in in_file)
    numbers = [[number_of.get(digest, -1) for digest in of_rank] for of_rank in used]
    numbers = torch.tensor(numbers).view(len(used), args.epochs, -1)
    # An image counts once, or as often as it is in the file.
    visits = [Counter(epoch.flatten().tolist()) for epoch in numbers.unbind(dim=1)]
    once = min((of_epoch & copies).total() for of_epoch in visits)
    print(f"left out of an epoch: {len(in_file) - once:,} images, others in the next")
    _, batches = stream.share(max(1, args.workers))
    steps = batches * max(1, args.workers)
    limit = min(steps, args.max_steps or steps) * args.batch_size * len(used)
    orders = numbers.unique(dim=1).shape[1]
    # How far apart in the file are an image and the next? After a full shuffle a third.
    mixed = numbers.diff().abs().double().mean().item() / (len(number_of) / 3)
    gap = gap_to_memory(losses, numbers, train_set, device, args)
    claim = f"{once:,} of {len(in_file):,} images once an epoch (limit {limit:,})"
    claim += f", {orders} orders (limit {args.epochs})"
    claim += f", {mixed:.0%} as mixed as by a full shuffle (limit 25%)"
    claim += f", losses within {gap:.0e} of those from memory (limit {ROUNDING:.0e})"
    same = resumes(stream, used[0], args)
    claim += f", {'the same' if same else 'NOT the same'} after a restart in the middle"
    complete = once == limit and orders == args.epochs
    return claim, complete and mixed >= 0.25 and gap <= ROUNDING and same


def resumes(stream, used, args):
    """Return whether rank 0's stream, begun in the middle, gives the rest of an epoch.

    used: the digests of what this rank has used, one epoch after the other.
    """
    steps = len(used) // args.epochs // args.batch_size
    done = steps // 2
    stream.set_epoch(0, done)
    loader = DataLoader(stream, None, num_workers=args.workers, timeout=args.limit)
    again = []
    list(noted(islice(loader, steps - done), again))
    return again == used[done * args.batch_size : steps * args.batch_size]


def gap_to_memory(losses, numbers, train_set, device, args):
    """Train again on this process alone, on the same images from memory.

    Return the largest difference of the losses of the first 10 steps. Not more: once
    rounding has switched one ReLU, the difference grows with each step.
    """
    steps = numbers[:, 0].split(args.batch_size, dim=1)[:10]  # each: [ranks, batch]
    batches = []
    for step in steps:
        known = step.flatten().clamp(min=0)  # -1: an image that is not in the file
        batches.append([x.index_select(0, known) for x in train_set.tensors])
    torch.manual_seed(args.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    expected = train_one_epoch(model, batches, optimizer, device)
    return (losses[: len(expected)] - expected).abs().max().item()


def read_file(args, before=""):
    """Return a data set of the file: images, uint8 [N, 28, 28], and labels, [N]."""
    with h5py.File(args.file) as file:
        images = torch.from_numpy(file[f"{before}images"][:])
        labels = torch.from_numpy(file[f"{before}labels"][:])
    return TensorDataset(images, labels)


def contents(path):
    """Return what tells a file from another one, without reading all of its images."""
    with h5py.File(path) as file:
        images = file["images"]
        written = file.attrs.get("sha256")  # of all images: create_mnist_h5 notes it
        labels = sha256(file["labels"][:]).hexdigest()
        return images.shape, images.chunks, images.dtype.str, written, labels


def check_copies(path, own):
    """Stop if ranks differ: each node may have a copy of its own. All ranks call this.

    own: this rank's value, which must be rank 0's, too.
    """
    copies = gather(own)
    odd = [rank for rank, copy in enumerate(copies) if copy != copies[0]]
    if odd:
        if dist.get_rank() == 0:
            sentence = f"{path} is not the same on ranks {odd} as on rank 0"
            print(f"{sentence}. Copy the right one to all.", file=sys.stderr)
        dist.barrier()  # the first rank that ends may end the others
        sys.exit(1)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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

    with SummaryWriter(FOLDER, purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


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
    add("--epochs", type=int, default=2, help="epochs (2)")
    add("--batch-size", type=int, default=64, help="per process (64)")
    add("--lr", type=float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, help="end each epoch after so many steps")
    add("--file", type=Path, default=DATA / "mnist.h5", help="of create_mnist_h5.py")
    add("--workers", type=int, default=1, help="processes that read, per rank (1)")
    add("--buffer", type=int, default=8, help="chunks shuffled together (8)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        least = 0 if name in ("seed", "workers") else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    ranks = int(os.environ["WORLD_SIZE"])
    try:
        Listener().close()  # a socket in TMPDIR: workers send through such ones
    except OSError as error:
        parser.error(f"workers cannot send, set TMPDIR to a short path: {error}")
    try:
        stream = ChunkStream(args.file, args.batch_size, 0, ranks, 0, args.buffer)
    except (OSError, KeyError, AttributeError, ValueError) as error:
        todo = "" if args.file.exists() else ". Make it: python day2/create_mnist_h5.py"
        parser.error(f"{args.file} cannot be streamed: {error.args[-1]}{todo}")
    # Seconds that a rank waits for a worker, which alone needs such a limit.
    args.limit = int(os.environ.get("DIST_TIMEOUT", 60)) if args.workers else 0
    if stream.share(max(1, args.workers))[1] == 0:
        parser.error(f"{args.file} has not one batch for each worker of each rank")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
