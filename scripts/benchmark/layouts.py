"""Files of MNIST in several layouts, and reading them in random order.

Each way delivers all images, uint8 [N, 28, 28], with their labels, int64 [N], as tensors. "One at a
time" is what a Dataset with __getitem__ does: numbers in random order, one read each. "Whole
chunks" is ChunkStream of lesson 11: chunks in random order, some of them read at once, then
shuffled in memory.
"""

import argparse
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import h5py
import numpy as np
import torch
from course.lists import ROOT, load
from torch.utils.data import TensorDataset

STREAM = "day2/11_mnist_ddp_pt_multinode_streaming.py"
CREATE = "day2/create_mnist_h5.py"
BATCH = 64  # images
BUFFER = 2048  # images shuffled together, whatever the size of a chunk
SECONDS = 0.5  # a measurement ends with the first batch after that


def make_file(path, tensors, chunk_size=256, gzip=None, copies=1):
    """Have create_mnist_h5.py write the four tensors of MNIST to a file. Return its path."""
    options = argparse.Namespace(chunk_size=chunk_size, gzip=gzip, copies=copies)
    sets = TensorDataset(*tensors[:2]), TensorDataset(*tensors[2:])
    with h5py.File(path, "x") as file:
        load(CREATE).write_images(file, *sets, options)
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


def one_at_a_time_from_memmap(folder):
    """Yield as one_at_a_time does, from arrays in files that are mapped for it."""
    yield from one_at_a_time(*mapped(folder))


def mapped(folder):
    """Return images and labels as arrays that lie in files."""
    return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")]


def from_lmdb(path):
    """Yield as one_at_a_time does, from a database whose keys are the numbers of the images."""
    import lmdb

    with lmdb.open(str(path), readonly=True, lock=False) as base, base.begin() as reader:
        for numbers in torch.randperm(base.stat()["entries"]).split(BATCH):
            values = [reader.get(number.to_bytes(4)) for number in numbers.tolist()]
            data = torch.from_numpy(np.stack([np.frombuffer(x, np.uint8) for x in values]))
            yield data[:, :-1].view(-1, 28, 28), data[:, -1].long()  # the label stands last


def make_lmdb(path, images, labels):
    """Write images and labels to a database, each pair as one value. Return its path."""
    import lmdb

    size = 4 * images.nbytes  # what it may grow to
    with lmdb.open(str(path), map_size=size) as base, base.begin(write=True) as writer:
        for i, (image, label) in enumerate(zip(images, labels)):
            writer.put(i.to_bytes(4), image.tobytes() + bytes([label]))
    return path


def from_webdataset(paths):
    """Yield batches from tar archives: read in their order, then shuffled in a buffer."""
    import webdataset

    samples = webdataset.WebDataset(paths, shardshuffle=len(paths)).shuffle(BUFFER)
    # Collated by hand: the library's own way costs more.
    for some in samples.batched(BATCH, collation_fn=None):
        images = np.stack([np.frombuffer(x["image"], np.uint8) for x in some])
        labels = np.array([x["label"][0] for x in some], dtype=np.int64)
        yield torch.from_numpy(images).view(-1, 28, 28), torch.from_numpy(labels)


def make_webdataset(path, images, labels, shards=8):
    """Write images and labels to tar archives, each as a small file. Return their paths."""
    import webdataset

    paths = [f"{path}-{shard}.tar" for shard in range(shards)]
    for shard, name in enumerate(paths):
        with webdataset.TarWriter(name, mtime=1) as writer:  # one that needs no second header
            for i in range(shard, len(labels), shards):
                sample = {"image": images[i].tobytes(), "label": bytes([labels[i]])}
                writer.write({"__key__": f"{i:08}", **sample})
    return paths


def blocks(images, labels, size):
    """Yield buffers of images and labels: blocks in random order, shuffled once more together."""
    begins = torch.randperm(-(-len(labels) // size)) * size
    for some in begins.split(BUFFER // size):
        slices = [slice(begin, begin + size) for begin in some.tolist()]
        order = torch.randperm(sum(len(labels[part]) for part in slices))
        for_each = ([data[part] for part in slices] for data in (images, labels))
        yield [torch.from_numpy(np.concatenate(x)).index_select(0, order) for x in for_each]


def whole_chunks(chunk_stream, path, epoch):
    """Yield buffers of images and labels as lesson 11 reads them, alone and with no worker."""
    with h5py.File(path) as file:
        buffer = BUFFER // file["images"].chunks[0]
    args = argparse.Namespace(
        file=path, batch_size=BATCH, max_steps=None, seed=0, shuffle=True, workers=0, buffer=buffer
    )
    stream = chunk_stream(0, 1, args)
    stream.epoch = epoch
    return iter(stream)


def peak_memory(path, whole):
    """Read a file, as a whole or in whole chunks. Return the most memory held, in MB; on Linux."""
    if whole:
        with h5py.File(path) as file:
            torch.from_numpy(file["images"][:])
    else:
        for _ in whole_chunks(load(STREAM).ChunkStream, path, epoch=0):
            pass
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1e3


def rate(read, seconds=SECONDS, epochs=None):
    """Return images/s. read(epoch) yields the batches of an epoch; called again until time is up.

    With epochs it ends after so many, even if that takes less time.
    """
    images, begin = 0, time.perf_counter()
    for epoch in range(epochs) if epochs else count():
        for batch, _ in read(epoch):
            images += len(batch)
            elapsed = time.perf_counter() - begin
            if elapsed > seconds:
                return images / elapsed
    return images / (time.perf_counter() - begin)


def stored(path):
    """Return how many MB the images of training take in an HDF5 file."""
    with h5py.File(path) as file:
        return file["images"].id.get_storage_size() / 1e6


def make_ways(folder, tensors):
    """Make the files from the four tensors of MNIST. Return a list of rows.

    A row is (layout, how it is read, MB of the images of training, read, the files that it reads).
    """
    images, labels = (tensor.numpy() for tensor in tensors[:2])
    middle = make_file(folder / "256.h5", tensors)
    zipped = make_file(folder / "gzip.h5", tensors, gzip=4)
    chunked = {
        "chunks of 64": make_file(folder / "64.h5", tensors, chunk_size=64),
        "chunks of 256": middle,
        "chunks of 1024": make_file(folder / "1024.h5", tensors, chunk_size=1024),
        "chunks of 256, gzip 4": zipped,
    }
    plain = folder / "plain.h5"
    with h5py.File(plain, "x") as target:
        target["images"], target["labels"] = images, labels
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    arrays = [folder / "images.npy", folder / "labels.npy"]

    one = "one at a time"
    rows = [
        ("HDF5, not chunked", one, plain, lambda epoch: one_at_a_time_from_hdf5(plain)),
        ("HDF5, chunks of 256", one, middle, lambda epoch: one_at_a_time_from_hdf5(middle)),
        ("HDF5, chunks of 256, gzip 4", one, zipped, lambda epoch: one_at_a_time_from_hdf5(zipped)),
    ]
    stream = load(STREAM).ChunkStream
    rows += [
        (
            f"HDF5, {layout}",
            "whole chunks",
            path,
            lambda epoch, path=path: whole_chunks(stream, path, epoch),
        )
        for layout, path in chunked.items()
    ]
    rows = [(layout, how, stored(path), read, [path]) for layout, how, path, read in rows]
    size = images.nbytes / 1e6
    rows += [
        ("memmap", one, size, lambda epoch: one_at_a_time_from_memmap(folder), arrays),
        ("memmap", "blocks of 256", size, lambda epoch: blocks(*mapped(folder), 256), arrays),
    ]
    if find_spec("lmdb"):
        base = make_lmdb(folder / "lmdb", images, labels)
        files = [base / "data.mdb"]
        rows.append(("LMDB", one, size, lambda epoch: from_lmdb(base), files))
    if find_spec("webdataset"):
        # Archives of a part are enough to measure, and writing them takes long.
        shards = make_webdataset(folder / "shard", images[:10_000], labels[:10_000])
        how = "in order, then shuffled"
        rows.append(("WebDataset", how, size, lambda epoch: from_webdataset(shards), shards))
    return rows


def load_tensors():
    """Return MNIST as four tensors: images and labels for training, then for testing."""
    train_set, test_set = load(CREATE).load_mnist(ROOT / "data")
    return [*train_set.tensors, *test_set.tensors]
