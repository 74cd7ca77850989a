"""Measure how fast MNIST is read in random order from HDF5 files of several layouts.

Run: python day2/read_speed.py       prints a Markdown table, in less than a minute

One process, one thread. "One at a time" is what a Dataset with __getitem__ does: one
read for each image. "Whole chunks" is ChunkStream of lesson 11. The files have just
been written and are still in memory (the page cache) when they are read: this measures
the work of reading, not the disk, and so it counts CPU-seconds, which hardly depend on
what else runs. Put your own arrays in the place of MNIST to measure those.
"""

import argparse
import importlib
import itertools
import platform
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from torchvision.datasets import MNIST

ChunkStream = importlib.import_module("11_mnist_ddp_pt_multinode_streaming").ChunkStream
DATA = Path(__file__).resolve().parent.parent / "data"
BATCH = 64  # images
BUFFER = 2048  # images shuffled together, whatever the chunk size
SECONDS = 1.5  # a measurement ends with the first batch after that


def one_at_a_time(path, epoch):
    """Yield batches in random order, each image and its label read by itself."""
    with h5py.File(path) as file:
        both = file["images"], file["labels"]
        for indices in torch.randperm(len(both[0])).split(BATCH):
            rows = [np.stack([x[i] for i in indices.tolist()]) for x in both]
            yield [torch.from_numpy(x) for x in rows]


def whole_chunks(path, epoch):
    """Yield batches of images and labels as lesson 11 reads them, with no worker."""
    with h5py.File(path) as file:
        buffer = BUFFER // file["images"].chunks[0]
    stream = ChunkStream(path, BATCH, 0, 1, 0, buffer)
    stream.set_epoch(epoch)
    return iter(stream)


# The rows of the table: the layout, options of create_dataset, how it is read, and by
# which function.
SIZES = (64, 256, 1024)
CHUNKS = {size: {"chunks": (size, 28, 28), "fletcher32": True} for size in SIZES}
GZIP = {**CHUNKS[256], "compression": 4}
WAYS = [
    ("not chunked", {}, "one at a time", one_at_a_time),
    ("chunks of 256", CHUNKS[256], "one at a time", one_at_a_time),
    ("chunks of 256, gzip 4", GZIP, "one at a time", one_at_a_time),
    ("chunks of 64", CHUNKS[64], "whole chunks", whole_chunks),
    ("chunks of 256", CHUNKS[256], "whole chunks", whole_chunks),
    ("chunks of 1024", CHUNKS[1024], "whole chunks", whole_chunks),
    ("chunks of 256, gzip 4", GZIP, "whole chunks", whole_chunks),
]


def write(path, options, images, labels):
    """Write images, uint8 [N, 28, 28], and labels. Return the images' size, in MB."""
    with h5py.File(path, "w") as file:
        file["labels"] = labels
        stored = file.create_dataset("images", data=images, **options)
        file.flush()
        return stored.id.get_storage_size() / 1e6


def rate(read, path):
    """Return images per CPU-second. read(path, epoch) yields batches, for some time."""
    images = 0
    begin = time.process_time()
    for epoch in itertools.count():
        for batch, _ in read(path, epoch):
            images += len(batch)
            elapsed = time.process_time() - begin
            if elapsed > SECONDS:
                return images / elapsed


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set = MNIST(DATA, train=True)
    images, labels = train_set.data.numpy(), train_set.targets.numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mnist.h5")
        sizes, rates = [], []
        for _, options, _, read in WAYS:
            sizes.append(write(path, options, images, labels))
            rates.append(rate(read, path))
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    hdf5 = f"h5py {h5py.__version__} with HDF5 {h5py.version.hdf5_version}"
    print(f"{platform.system()}, {versions}, {hdf5}, numpy {np.__version__}\n")
    print("| layout | read | MB | images per CPU-second | against the first |")
    print("|---|---|---|---|---|")
    for (layout, _, how, _), size, found in zip(WAYS, sizes, rates):
        ratio = found / rates[0]
        print(f"| {layout} | {how} | {size:.1f} | {found:,.0f} | {ratio:.2g} |")


if __name__ == "__main__":
    main()
