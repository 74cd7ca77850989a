"""Measure how fast MNIST can be read in random order from files of several layouts.

Usage: scripts/read_speed.py      prints a Markdown table, in less than a minute

One process, one thread. "One at a time" is what a Dataset with __getitem__ does: one read for each
image. "Whole chunks" is ChunkStream of lesson 11. The files have just been written and are still in
memory (the page cache) when they are read: this measures the work of reading, not the disk.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from course.lists import ROOT, load
from course.machine import recorded

CREATE = load("day2/create_mnist_h5.py")
STREAM = load("day2/11_mnist_ddp_pt_multinode_streaming.py")
BATCH = 64  # images
BUFFER = 2048  # images shuffled together, whatever the size of a chunk
SECONDS = 0.5  # a measurement ends with the first batch after that
REPEATS = 3


def make_file(path, sets, chunk_size=256, gzip=None):
    """Have create_mnist_h5.py write both sets of MNIST to a file. Return its path."""
    options = argparse.Namespace(chunk_size=chunk_size, gzip=gzip, copies=1)
    with h5py.File(path, "x") as file:
        CREATE.write_images(file, *sets, options)
    return path


def one_at_a_time(images, labels):
    """Yield batches in random order, each image, uint8 [28, 28], and its label read by itself."""
    for indices in torch.randperm(len(labels)).split(BATCH):
        yield (
            torch.from_numpy(np.stack([images[i] for i in indices.tolist()])),
            torch.from_numpy(np.stack([labels[i] for i in indices.tolist()])),
        )


def from_hdf5(path, epoch):
    """Yield as one_at_a_time does, from an HDF5 file that is opened for it."""
    with h5py.File(path) as file:
        yield from one_at_a_time(file["images"], file["labels"])


def mapped(folder):
    """Return images and labels as arrays that lie in files."""
    return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")]


def from_memmap(folder, epoch):
    """Yield as one_at_a_time does, from arrays in files that are mapped for it."""
    yield from one_at_a_time(*mapped(folder))


def blocks(folder, epoch, size=256):
    """Yield buffers of mapped images and labels: blocks in random order, shuffled together."""
    images, labels = mapped(folder)
    begins = torch.randperm(-(-len(labels) // size)) * size
    for some in begins.split(BUFFER // size):
        slices = [slice(begin, begin + size) for begin in some.tolist()]
        order = torch.randperm(sum(len(labels[part]) for part in slices))
        yield [
            torch.from_numpy(np.concatenate([data[part] for part in slices]))[order]
            for data in (images, labels)
        ]


def whole_chunks(path, epoch):
    """Yield batches of images and labels as lesson 11 reads them, with no worker."""
    with h5py.File(path) as file:
        buffer = BUFFER // file["images"].chunks[0]
    args = argparse.Namespace(
        file=path, batch_size=BATCH, max_steps=None, seed=0, shuffle=True, buffer=buffer
    )
    stream = STREAM.ChunkStream(0, 1, args)
    stream.epoch = epoch
    return iter(stream)


def make_ways(folder):
    """Make the files. Return rows (layout, how it is read, MB of the images, read(epoch))."""
    sets = CREATE.load_mnist(ROOT / "data")
    images, labels = (tensor.numpy() for tensor in sets[0].tensors)
    plain = folder / "plain.h5"
    with h5py.File(plain, "x") as file:
        file["images"], file["labels"] = images, labels
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    files = {
        "HDF5, not chunked": plain,
        "HDF5, chunks of 64": make_file(folder / "64.h5", sets, chunk_size=64),
        "HDF5, chunks of 256": make_file(folder / "256.h5", sets),
        "HDF5, chunks of 1024": make_file(folder / "1024.h5", sets, chunk_size=1024),
        "HDF5, chunks of 256, gzip 4": make_file(folder / "gzip.h5", sets, gzip=4),
    }
    not_chunked, small, middle, large, packed = files
    ways = [(x, "one at a time", from_hdf5) for x in (not_chunked, middle, packed)]
    ways += [(x, "whole chunks", whole_chunks) for x in (small, middle, large, packed)]
    rows = [(x, how, stored(files[x]), partial(read, files[x])) for x, how, read in ways]
    size = images.nbytes / 1e6
    rows.append(("memmap", "one at a time", size, partial(from_memmap, folder)))
    rows.append(("memmap", "blocks of 256", size, partial(blocks, folder)))
    return rows


def stored(path):
    """Return how many MB the images of training take in an HDF5 file."""
    with h5py.File(path) as file:
        return file["images"].id.get_storage_size() / 1e6


def rate(read):
    """Return images/s. read(epoch) yields the batches of an epoch; called until time is up."""
    images = 0
    begin = time.perf_counter()
    for epoch in itertools.count():
        for batch, _ in read(epoch):
            images += len(batch)
            elapsed = time.perf_counter() - begin
            if elapsed > SECONDS:
                return images / elapsed


def main():
    """Measure all ways in turn, several times; print where and when, then the table of medians."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ways = make_ways(Path(folder))
        rates = [[rate(read) for *_, read in ways] for _ in range(REPEATS)]
    medians = [statistics.median(column) for column in zip(*rates)]
    hdf5 = f"h5py {h5py.__version__} with HDF5 {h5py.version.hdf5_version}"
    print(recorded("python scripts/read_speed.py", hdf5, f"numpy {np.__version__}"))
    print("| layout | read | MB | images/s | against the first |")
    print("|---|---|---|---|---|")
    for (layout, how, size, _), median in zip(ways, medians):
        print(f"| {layout} | {how} | {size:.1f} | {median:,.0f} | {median / medians[0]:.2g} |")


if __name__ == "__main__":
    main()
