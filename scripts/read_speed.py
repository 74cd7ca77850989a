"""Measure how fast MNIST can be read in random order from files of several layouts.

Usage: scripts/read_speed.py      prints a Markdown table, in less than a minute

One process, one thread. Each way delivers all images, uint8 [N, 28, 28], with their labels, int64
[N], as tensors. "One at a time" is what a Dataset with __getitem__ does: numbers in random order,
one read each. "Whole chunks" is ChunkStream of lesson 11: chunks in random order, some of them
read at once, then shuffled in memory. The files are made anew and are still in memory (the page
cache) when they are read: this measures the work of reading, not the disk.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import h5py
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
LESSON = ROOT / "day2" / "11_mnist_ddp_pt_multinode_streaming.py"
BATCH = 64  # images
BUFFER = 2048  # images shuffled together, whatever the size of a chunk
REPEATS = 3
SECONDS = 0.5  # a measurement ends with the first batch after that


def load_lesson():
    """Return lesson 11 as a module, for its class ChunkStream."""
    spec = importlib.util.spec_from_file_location("lesson", LESSON)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_file(folder, name, *options):
    """Have create_mnist_h5.py write a file. Return its path; exit if that fails."""
    path = folder / f"{name}.h5"
    command = [sys.executable, str(ROOT / "day2" / "create_mnist_h5.py"), "--file", str(path)]
    done = subprocess.run([*command, *options], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit("create_mnist_h5.py could not make a file: see above.")
    return path


def one_at_a_time(images, labels):
    """Yield batches of images and labels in random order, each image and label read by itself."""
    for numbers in torch.randperm(len(labels)).split(BATCH):
        numbers = numbers.tolist()
        yield (
            torch.from_numpy(np.stack([images[i] for i in numbers])),
            torch.from_numpy(np.stack([labels[i] for i in numbers])),
        )


def one_at_a_time_from_hdf5(path):
    """Yield as one_at_a_time does, from an HDF5 file that is opened for it."""
    with h5py.File(path) as file:
        yield from one_at_a_time(file["images"], file["labels"])


def blocks(images, labels, size):
    """Yield buffers of images and labels: blocks in random order, shuffled once more together."""
    begins = torch.randperm(-(-len(labels) // size)) * size
    for some in begins.split(BUFFER // size):
        slices = [slice(begin, begin + size) for begin in some.tolist()]
        order = torch.randperm(sum(len(labels[part]) for part in slices))
        yield [
            torch.from_numpy(np.concatenate([data[part] for part in slices]))[order]
            for data in (images, labels)
        ]


def whole_chunks(chunk_stream, path, epoch):
    """Yield buffers of images and labels as lesson 11 reads them, alone and with no worker."""
    with h5py.File(path) as file:
        buffer = BUFFER // file["images"].chunks[0]
    args = argparse.Namespace(
        file=path, batch_size=BATCH, max_steps=None, seed=0, shuffle=True, workers=0, buffer=buffer
    )
    stream = chunk_stream(0, 1, args)
    stream.epoch.fill_(epoch)
    return iter(stream)


def rate(read):
    """Return images/s. read(epoch) yields the batches of an epoch; it is called again and again."""
    images, begin = 0, time.perf_counter()
    for epoch in count():
        for batch, _ in read(epoch):
            images += len(batch)
            elapsed = time.perf_counter() - begin
            if elapsed > SECONDS:
                return images / elapsed


def stored(path):
    """Return how many MB the images of training take in an HDF5 file."""
    with h5py.File(path) as file:
        return file["images"].id.get_storage_size() / 1e6


def make_ways(folder):
    """Make the files. Return a list of rows: (layout, how it is read, MB, read)."""
    chunk_stream = load_lesson().ChunkStream
    chunked = {
        f"chunks of {size}": make_file(folder, size, "--chunk-size", str(size))
        for size in (64, 256, 1024)
    }
    middle = chunked["chunks of 256"]
    chunked["chunks of 256, gzip 4"] = zipped = make_file(folder, "gzip", "--gzip", "4")
    plain = folder / "plain.h5"
    with h5py.File(middle) as source, h5py.File(plain, "x") as target:
        images, labels = source["images"][:], source["labels"][:]
        target["images"], target["labels"] = images, labels
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    mapped = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")]

    one = "one at a time"
    rows = [
        ("HDF5, not chunked", one, plain, lambda epoch: one_at_a_time_from_hdf5(plain)),
        ("HDF5, chunks of 256", one, middle, lambda epoch: one_at_a_time_from_hdf5(middle)),
        ("HDF5, chunks of 256, gzip 4", one, zipped, lambda epoch: one_at_a_time_from_hdf5(zipped)),
    ]
    rows += [
        (
            f"HDF5, {layout}",
            "whole chunks",
            path,
            lambda epoch, path=path: whole_chunks(chunk_stream, path, epoch),
        )
        for layout, path in chunked.items()
    ]
    rows = [(layout, how, stored(path), read) for layout, how, path, read in rows]
    size = images.nbytes / 1e6
    rows.append(("memmap", one, size, lambda epoch: one_at_a_time(*mapped)))
    rows.append(("memmap", "blocks of 256", size, lambda epoch: blocks(*mapped, 256)))
    return rows


def main():
    """Measure all ways in turn, several times; print where and when, then the table of medians."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ways = make_ways(Path(folder))
        rates = [[rate(read) for *_, read in ways] for _ in range(REPEATS)]
    medians = [statistics.median(column) for column in zip(*rates)]
    print(
        f"Recorded on {time.strftime('%Y-%m-%d')} with `python scripts/read_speed.py`: "
        f"{platform.system()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"torch {torch.__version__.partition('+')[0]}, h5py {h5py.__version__} with HDF5 "
        f"{h5py.version.hdf5_version}, numpy {np.__version__}.\n"
    )
    print("| layout | read | MB | images/s | against the first |")
    print("|---|---|---|---|---|")
    for (layout, how, size, _), median in zip(ways, medians):
        print(f"| {layout} | {how} | {size:.1f} | {median:,.0f} | {median / medians[0]:.2g} |")


if __name__ == "__main__":
    main()
