"""Lesson 11: data too large for memory, streamed from disk chunk by chunk.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  IterableDataset, worker, shuffle buffer
Run:      scripts/multinode_setup_and_run.sh day2/11_mnist_ddp_pt_multinode_streaming.py
Look for:  => ... images once an epoch (limit ...), losses within ... (limit ...): ok
Try next:  --workers 2; --no-shuffle; a file of 20 copies: does the memory grow?
"""

import argparse
import os
import shutil
import sys
import time
from bisect import bisect
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, islice, zip_longest
from multiprocessing import active_children
from pathlib import Path

import h5py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from tqdm import tqdm


class ChunkStream(IterableDataset):
    """Batches from an HDF5 file of any size. Only a few chunks are in memory at a time.

    A chunk is the piece in which the file is stored and read. Each epoch has a new
    order of the chunks. Each rank takes an equal stretch of it, and its workers divide
    the stretch. They read ahead while the rank trains: a worker fills its shuffle
    buffer with a few chunks, then yields their images in random order.
    """

    def __init__(self, rank, world_size, args):
        self.rank = rank
        self.args = args
        self.epoch = 0
        with h5py.File(args.file) as file:  # closed again: each worker opens its own
            self.images = len(file["labels"])
            self.chunk_size = file["images"].chunks[0]  # .chunks: the shape of a chunk
        # All ranks take the same number of steps. With unequal numbers DDP would hang.
        self.steps = self.images // (args.batch_size * world_size)
        self.steps = min(self.steps, args.max_steps or self.steps)

    def __len__(self):
        return self.steps

    def __iter__(self):
        """Yield a worker's batches: images, uint8 [N, 28, 28], and labels, [N]."""
        info = get_worker_info()
        worker = info.id if info else 0  # no info: no workers, the rank itself reads
        workers = info.num_workers if info else 1
        with h5py.File(self.args.file) as file:
            for parts, permutation in self.plan(worker, workers):
                images = read(file["images"], parts)  # these slices, not the whole
                labels = read(file["labels"], parts)
                for indices in permutation.split(self.args.batch_size):
                    yield images[indices], labels[indices]

    def plan(self, worker, workers):
        """Yield for each buffer the slices of the file to read, and a permutation."""
        # The same seed on all ranks: all must agree on the order of the chunks.
        generator = torch.Generator().manual_seed(self.args.seed + self.epoch)
        begins = torch.arange(0, self.images, self.chunk_size)  # of chunks in the file
        begins = begins[shuffled(len(begins), generator, self.args)].tolist()
        sizes = [min(self.chunk_size, self.images - begin) for begin in begins]
        starts = list(accumulate(sizes, initial=0))  # where they begin in this order
        # This worker's stretch of that order, in batches; how many fit into a buffer.
        first_batch = self.rank * self.steps + self.steps * worker // workers
        end_batch = self.rank * self.steps + self.steps * (worker + 1) // workers
        batch_size = self.args.batch_size
        buffer_batches = max(1, self.args.buffer * self.chunk_size // batch_size)
        for batch in range(first_batch, end_batch, buffer_batches):
            place = batch * batch_size
            buffer_end = min(batch + buffer_batches, end_batch) * batch_size
            permutation = shuffled(buffer_end - place, generator, self.args)
            parts = []
            while place < buffer_end:
                i = bisect(starts, place) - 1  # the chunk in which this place is
                begin = begins[i] + place - starts[i]  # the same place, in the file
                count = min(starts[i + 1], buffer_end) - place
                parts.append(slice(begin, begin + count))
                place += count
            yield parts, permutation


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


def train(train_set, world_size, lr, device, args):
    """Train a new model on world_size ranks. Return it and the losses of all steps."""
    global_batch_size = args.batch_size * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # At first a large rate can diverge: begin with args.lr, then raise it to lr.
    scheduler = LinearLR(optimizer, start_factor=args.lr / lr, total_iters=args.warm_up)
    # None: the stream yields batches. Each epoch, new workers copy the stream.
    loader = DataLoader(train_set, batch_size=None, num_workers=args.workers)
    losses = []
    for epoch in range(args.epochs):
        train_set.epoch = epoch  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = watch_memory(progress(loader), "streamed")
        epoch_losses = train_one_epoch(ddp_model, batches, optimizer, scheduler, device)
        losses.append(mean_over_ranks(epoch_losses, world_size))
        report_epoch(epoch, losses[-1], global_batch_size * len(loader), begin)
    return model, torch.cat(losses)


def main(device, args):
    """Run on every rank: train from the file, evaluate, repeat it from memory."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set = ChunkStream(rank, world_size, args)
    lr = args.lr * world_size  # the linear scaling rule
    model, losses = train(train_set, world_size, lr, device, args)
    once = count_visits(train_set, device)  # every rank must call this
    gap = None
    if not args.stream_only:
        gap = gap_to_memory(losses, train_set, lr, device, args)
    if rank == 0:
        write_scalars(losses, args.batch_size * world_size)
        print(f"test accuracy: {evaluate(model, load_test_set(args), device):.2%}")
        return prove(*check_stream(train_set, once, gap))


# ---- The same in every lesson that has it; explained on the page of the first one

ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def read(data, parts):
    """Return these parts of an HDF5 data set as one tensor."""
    return torch.cat([torch.from_numpy(data[part]) for part in parts])


def shuffled(count, generator, args):
    """Return the numbers from 0 to count - 1, shuffled except with --no-shuffle."""
    if args.shuffle:
        return torch.randperm(count, generator=generator)
    return torch.arange(count)


def order_of(stream):
    """Return the numbers of the images, [M], in the order that this rank gets."""
    workers = max(1, stream.args.workers)
    batches = [[] for _ in range(workers)]
    for worker in range(workers):
        for parts, permutation in stream.plan(worker, workers):
            numbers = [torch.arange(part.start, part.stop) for part in parts]
            numbers = torch.cat(numbers)[permutation]
            batches[worker] += numbers.split(stream.args.batch_size)
    # The loader takes one batch of each worker in turn, as long as there are any.
    in_turn = []
    for turn in zip_longest(*batches):
        in_turn += [batch for batch in turn if batch is not None]
    return torch.cat(in_turn)


def count_visits(stream, device):
    """Return how many images the ranks visit exactly once in an epoch.

    It counts by the plan that the workers have followed. Every rank must call this.
    """
    visits = order_of(stream).bincount(minlength=stream.images).to(device)
    dist.all_reduce(visits)
    return (visits == 1).sum().item()


def check_stream(stream, once, gap):
    """Return the claim of the proof line, and whether it holds."""
    limit = stream.steps * stream.args.batch_size * dist.get_world_size()
    claim = f"{once:,} of {stream.images:,} images once an epoch (limit {limit:,})"
    if gap is None:  # with --stream-only
        return claim, once == limit
    claim += f", losses within {gap:.0e} of those from memory (limit {ROUNDING:.0e})"
    return claim, once == limit and gap <= ROUNDING


def gap_to_memory(losses, stream, lr, device, args):
    """Train again, with all images in memory. Compare the first 10 losses.

    Not more of them: a difference in rounding would grow with each step. Return the
    largest difference. Every rank must call this.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print("now the same batches from memory:")
    with h5py.File(args.file) as file:
        images = torch.from_numpy(file["images"][:])
        labels = torch.from_numpy(file["labels"][:])
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = LinearLR(optimizer, start_factor=args.lr / lr, total_iters=args.warm_up)
    expected = []
    for epoch in range(args.epochs):
        stream.epoch = epoch
        order = order_of(stream).tolist()
        train_set = TensorDataset(images, labels)
        loader = DataLoader(train_set, batch_size=args.batch_size, sampler=order)
        begin = time.perf_counter()
        steps = watch_memory(progress(loader), "from memory")
        epoch_losses = train_one_epoch(model, steps, optimizer, scheduler, device)
        expected.append(mean_over_ranks(epoch_losses, world_size))
        report_epoch(epoch, expected[-1], len(order) * world_size, begin)
    return (losses - torch.cat(expected))[:10].abs().max().item()


def watch_memory(batches, source):
    """Yield the batches. Then print, on rank 0, the most memory held between them."""
    in_rank = 0
    in_workers = 0
    for step, batch in enumerate(batches):
        yield batch
        if dist.get_rank() == 0 and step % 20 == 0:
            in_rank = max(in_rank, memory_of("self", "Anonymous"))
            # A worker begins as a copy of the rank, and shares what neither changes.
            own = [memory_of(child.pid, "Private_Dirty") for child in active_children()]
            in_workers = max(in_workers, sum(own))
    if in_rank:
        workers = f", {in_workers:,.0f} MB more in its workers" if in_workers else ""
        print(f"{source}: at most {in_rank:,.0f} MB in rank 0{workers}")


def memory_of(process, kind):
    """Return how many MB of this kind a process holds; 0 if it has ended, or no Linux.

    Both kinds leave out mapped files, such as torch's libraries: processes share them.
    """
    with suppress(OSError), Path(f"/proc/{process}/smaps_rollup").open() as lines:
        for line in lines:
            if line.startswith(kind):
                return int(line.split()[1]) * 1024 / 1e6
    return 0


def load_test_set(args):
    """Return the file's test set: images, uint8 [N, 28, 28], and labels, int64 [N]."""
    with h5py.File(args.file) as file:
        images = torch.from_numpy(file["test_images"][:])
        labels = torch.from_numpy(file["test_labels"][:])
    return TensorDataset(images, labels)


def hdf5_file(text):
    """Return an argument as a path, if the file is there and holds what we read."""
    try:
        with h5py.File(text) as file:
            images, labels = file["images"], file["labels"]
            fits = images.shape == (len(labels), 28, 28) and images.chunks is not None
            fits = fits and "test_images" in file and "test_labels" in file
    except (OSError, KeyError):
        fits = False
    if not fits:
        problem = f"{text} is missing, damaged or of another kind"
        todo = "Make it: python day2/create_mnist_h5.py --force"
        raise argparse.ArgumentTypeError(f"{problem}. {todo}")
    return Path(text)


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


def report_epoch(epoch, losses, images, begin):
    """Print the mean loss of an epoch's steps, and images/s, on rank 0."""
    loss = losses.mean().item()  # waits for the device: only now may we read the clock
    speed = images / (time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")


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


def check_shared_memory(needed):
    """End with a sentence if /dev/shm, shared by processes, has fewer bytes free."""
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.exists() else needed
    if free < needed:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says it
            sys.exit(2)
        found = f"{needed / 1e6:.1f} MB are needed there, {free / 1e6:.1f} are free"
        todo = "Free some, or start the container with docker run --shm-size=1g"
        sys.exit(f"/dev/shm is too full: {found}. {todo}")


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


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--epochs", type=positive_int, default=1, help="epochs (1)")
    add("--batch-size", type=positive_int, default=64, help="per process (64)")
    add("--lr", type=positive_float, default=0.01, help="of one process (0.01)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, help="end each epoch after so many steps")
    add("--warm-up", type=positive_int, default=8, help="steps of it (8)")
    data = Path(__file__).parents[1] / "data" / "mnist.h5"
    add("--file", type=hdf5_file, default=str(data), help="made by create_mnist_h5.py")
    add("--workers", type=int, default=1, help="processes that read, per rank (1)")
    add("--buffer", type=positive_int, default=8, help="chunks shuffled together (8)")
    add("--no-shuffle", dest="shuffle", action="store_false", help="in file order")
    add("--stream-only", action="store_true", help="do not train from memory too")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    if args.workers < 0:
        parser.error(f"workers must not be negative, but is {args.workers}")
    if ChunkStream(0, int(os.environ["WORLD_SIZE"]), args).steps == 0:
        todo = "Take a smaller --batch-size."
        parser.error(f"{args.file} has not one batch for each rank. {todo}")
    # Of each worker, two batches are in use or handed over, and two are read ahead.
    batches = 4 * args.workers * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = 10_000 + args.batch_size * (28 * 28 + 8)  # whole pages; 8: the label
    check_shared_memory(batches * needed)
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
