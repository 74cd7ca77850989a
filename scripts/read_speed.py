"""Measure how fast MNIST can be read in random order from files of several layouts.

Usage: scripts/read_speed.py                     prints a Markdown table, in less than a minute
       scripts/read_speed.py --memory FILE       memory for streaming a file of create_mnist_h5.py

One process, one thread. "One at a time" is what a Dataset with __getitem__ does: one read for each
image. "Whole chunks" is ChunkStream of lesson 11. The files have just been written and are still in
memory (the page cache) when they are read: this measures the work of reading, not the disk.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from catalog import load
from system_info import recorded

CREATE = load("day2/create_mnist_h5.py")
STREAM = load("day2/11_mnist_ddp_pt_multinode_streaming.py")
NAMES = ("images", "labels")
BATCH = 64  # images
BUFFER = 2048  # images shuffled together, whatever the chunk size
SECONDS = 0.5  # a measurement ends with the first batch after that
REPEATS = 3


def make_files(folder):
    """Write the training set of MNIST in each layout. Return {layout: file or folder}."""
    sets = load("day1/2_mnist_training.py").load_mnist()
    plain = folder / "plain.h5"
    with h5py.File(plain, "x") as file:
        for name, tensor in zip(NAMES, sets[0].tensors):
            file[name] = tensor.numpy()
            np.save(folder / f"{name}.npy", tensor.numpy())
    files = {"HDF5, not chunked": plain, "memmap": folder}
    for size, gzip in ((64, None), (256, None), (1024, None), (256, 4)):
        layout = f"HDF5, chunks of {size}" + (f", gzip {gzip}" if gzip else "")
        files[layout] = folder / f"{layout}.h5"
        with h5py.File(files[layout], "x") as file:
            options = argparse.Namespace(chunk_size=size, gzip=gzip, copies=1)
            CREATE.write_images(file, *sets, options)
    return files


@contextlib.contextmanager
def arrays(path):
    """Yield images, uint8 [N, 28, 28], and labels of an HDF5 file, or mapped from a folder."""
    if path.is_dir():
        yield [np.load(path / f"{name}.npy", mmap_mode="r") for name in NAMES]
    else:
        with h5py.File(path) as file:
            yield [file[name] for name in NAMES]


def one_at_a_time(path, epoch):
    """Yield batches in random order, each image and its label read by itself."""
    with arrays(path) as both:
        for indices in torch.randperm(len(both[0])).split(BATCH):
            yield [torch.from_numpy(np.stack([x[i] for i in indices.tolist()])) for x in both]


def blocks(path, epoch, size=256):
    """Yield buffers of images and labels: blocks in random order, shuffled together."""
    with arrays(path) as both:
        begins = torch.randperm(-(-len(both[0]) // size)) * size
        for some in begins.split(BUFFER // size):
            parts = [[x[begin : begin + size] for begin in some.tolist()] for x in both]
            images, labels = (torch.from_numpy(np.concatenate(part)) for part in parts)
            order = torch.randperm(len(images))
            yield images[order], labels[order]


def whole_chunks(path, epoch):
    """Yield batches of images and labels as lesson 11 reads them, with no worker."""
    with arrays(path) as (images, _):
        buffer = BUFFER // images.chunks[0]
    stream = STREAM.ChunkStream(path, BATCH, 0, 1, 0, buffer)
    stream.set_epoch(epoch)
    return iter(stream)


# The rows of the table: the layout, how it is read, and by which function.
WAYS = [
    ("HDF5, not chunked", "one at a time", one_at_a_time),
    ("HDF5, chunks of 256", "one at a time", one_at_a_time),
    ("HDF5, chunks of 256, gzip 4", "one at a time", one_at_a_time),
    ("HDF5, chunks of 64", "whole chunks", whole_chunks),
    ("HDF5, chunks of 256", "whole chunks", whole_chunks),
    ("HDF5, chunks of 1024", "whole chunks", whole_chunks),
    ("HDF5, chunks of 256, gzip 4", "whole chunks", whole_chunks),
    ("memmap", "one at a time", one_at_a_time),
    ("memmap", "blocks of 256", blocks),
]


def rate(read, path):
    """Return images/s. read(path, epoch) yields the batches of an epoch, until time is up."""
    images = 0
    begin = time.perf_counter()
    for epoch in itertools.count():
        for batch, _ in read(path, epoch):
            images += len(batch)
            elapsed = time.perf_counter() - begin
            if elapsed > SECONDS:
                return images / elapsed


def held():
    """Return how many MB this process holds, without mapped files such as torch's libraries."""
    (kilobytes,) = re.findall(r"Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(kilobytes) * 1024 / 1e6


def print_memory(path):
    """Print how much more a process holds while it streams a file, and with all of it in memory."""
    before = held()
    batches = itertools.islice(whole_chunks(path, 0), None, None, 20)  # looking takes time
    streamed = max(held() for _ in batches) - before
    with arrays(path) as both:
        whole = [array[:] for array in both]
    print(f"| {path.stat().st_size / 1e6:.0f} MB | {streamed:.0f} MB | {held() - before:.0f} MB |")
    del whole


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = "only print the memory for streaming this file (Linux)"
    parser.add_argument("--memory", type=Path, metavar="FILE", help=words)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.memory:
        try:
            print_memory(args.memory)
        except (OSError, KeyError, AttributeError, ValueError) as error:
            parser.error(f"{args.memory} cannot be streamed: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder))
        sizes = []  # MB that the images take
        for layout, *_ in WAYS:
            with arrays(files[layout]) as (images, _):
                chunked = hasattr(images, "id")
                sizes.append((images.id.get_storage_size() if chunked else images.nbytes) / 1e6)
        rounds = [[rate(read, files[layout]) for layout, _, read in WAYS] for _ in range(REPEATS)]
    medians = [statistics.median(rates) for rates in zip(*rounds)]
    hdf5 = f"h5py {h5py.__version__} with HDF5 {h5py.version.hdf5_version}"
    print(recorded("python scripts/read_speed.py", hdf5, f"numpy {np.__version__}"))
    print("| layout | read | MB | images/s | against the first |")
    print("|---|---|---|---|---|")
    for (layout, how, _), size, median in zip(WAYS, sizes, medians):
        print(f"| {layout} | {how} | {size:.1f} | {median:,.0f} | {median / medians[0]:.2g} |")


if __name__ == "__main__":
    main()
