"""Measure how fast MNIST can be read in random order from files of several layouts.

Usage: scripts/read_speed.py                     prints a Markdown table, in less than a minute
       scripts/read_speed.py --memory FILE       memory for streaming a file of create_mnist_h5.py
       scripts/read_speed.py --libraries         lesson 11's stream beside three libraries

One process, one thread. "One at a time" is what a Dataset with __getitem__ does: one read for each
image. "Whole chunks" is ChunkStream of lesson 11. The files have just been written and are still in
memory (the page cache) when they are read: this measures the work of reading, not the disk.

--libraries counts CPU-seconds, which hardly depend on what else runs. Each library reads what it
wrote as its documentation says: shuffled, whole epochs, no worker, no decoding of pictures.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import h5py
import numpy as np
import torch
from catalog import load
from system_info import recorded
from torch.utils.data import DataLoader

CREATE = load("day2/create_mnist_h5.py")
STREAM = load("day2/11_mnist_ddp_pt_multinode_streaming.py")
NAMES = ("images", "labels")
BATCH = 64  # images
BUFFER = 2048  # images shuffled together, whatever the chunk size
SECONDS = 0.5  # a measurement ends with the first batch after that
REPEATS = 3
SHARD = 2**23  # bytes in a file of a library


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


def hdf5(h5py, path, images, buffer):
    """Write numbered images, uint8 [N, H, W]. For each epoch, yield what reads them."""
    with h5py.File(path / "images.h5", "x") as file:
        chunks = (buffer // 8, *images.shape[1:])
        file.create_dataset("images", data=images, chunks=chunks, fletcher32=True)
        file["labels"] = np.arange(len(images))
    stream = STREAM.ChunkStream(path / "images.h5", BATCH, 0, 1, 0, 8)
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        yield DataLoader(stream, batch_size=None)


def mosaic(streaming, path, images, buffer):
    columns = {"image": "ndarray:uint8:{},{}".format(*images.shape[1:]), "number": "int"}
    with streaming.MDSWriter(out=str(path), columns=columns, size_limit=SHARD) as writer:
        for number, image in enumerate(images):
            writer.write({"image": image, "number": number})
    dataset = streaming.StreamingDataset(local=str(path), shuffle=True, batch_size=BATCH)
    yield from itertools.repeat(streaming.StreamingDataLoader(dataset, batch_size=BATCH))


def tar(webdataset, path, images, buffer):
    with webdataset.ShardWriter(f"{path}/%04d.tar", maxsize=SHARD, verbose=0) as writer:
        for number, image in enumerate(images):  # its npy takes longer to decode than bytes
            writer.write({"__key__": f"{number:08}", "bin": image.tobytes(), "cls": number})
    dataset = webdataset.WebDataset(sorted(map(str, path.iterdir())), shardshuffle=100)
    dataset = dataset.shuffle(buffer).to_tuple("bin", "cls")
    dataset = dataset.map_tuple(lambda data: np.frombuffer(data, np.uint8), int).batched(BATCH)
    yield from itertools.repeat(webdataset.WebLoader(dataset, batch_size=None))


def lit(litdata, path, images, buffer):
    writer = litdata.streaming.writer.BinaryWriter(str(path), chunk_bytes=SHARD)
    for number, image in enumerate(images):  # as a tensor it would take several times as long
        writer[number] = {"image": image, "number": number}
    writer.done()
    writer.merge()
    dataset = litdata.StreamingDataset(str(path), shuffle=True, drop_last=True)
    yield from itertools.repeat(litdata.StreamingDataLoader(dataset, batch_size=BATCH))


# What pip installs, how it is imported, and how it writes and reads.
LIBRARIES = {
    "h5py": ("h5py", hdf5),
    "mosaicml-streaming": ("streaming", mosaic),
    "webdataset": ("webdataset", tar),
    "litdata": ("litdata", lit),
}


def checked(epoch, images, name):
    """Return how many images an epoch has. Stop unless each is as written, and comes once."""
    batches = [batch.values() if isinstance(batch, dict) else batch for batch in epoch]
    found, numbers = (torch.cat([torch.as_tensor(x) for x in part]) for part in zip(*batches))
    same = np.array_equal(found.flatten(), images[numbers].flatten())
    if not same or len(numbers.unique()) < max(len(numbers), 0.9 * len(images)):
        sys.exit(f"{name} did not give each image once, as it was written.")
    return len(numbers)


def cpu_rate(epochs, count):
    """Return images per second of CPU time, user and system, over epochs of count images."""
    done = seconds = 0
    begin = sum(os.times()[:4])  # of this process and of its children that have ended
    while seconds < SECONDS:
        done += count
        for _ in next(epochs):
            pass
        seconds = sum(os.times()[:4]) - begin
    return done / seconds


def compare_libraries():
    """Print images per CPU-second of lesson 11's stream and of each library that is there."""
    there = [name for name, (module, _) in LIBRARIES.items() if importlib.util.find_spec(module)]
    missing = " ".join(LIBRARIES.keys() - there)
    if missing:
        words = f"Not installed: {missing}. In an environment of its own, since numpy may change"
        print(f"{words}: pip install {missing}", file=sys.stderr)
    versions = [f"{name} {version(name)}" for name in there]
    print(recorded("python scripts/read_speed.py --libraries", *versions))
    print("| bytes of an image | read with | images per CPU-second | lesson 11 against it |")
    print("|---|---|---|---|")
    small = load("day1/2_mnist_training.py").load_mnist()[0].tensors[0][:20_000].numpy()
    large = np.random.default_rng(0).integers(0, 256, (2048, 256, 256), np.uint8)
    for images, buffer in ((small, 2048), (large, 128)):
        with tempfile.TemporaryDirectory() as folder:
            readers = []
            for name in there:
                module, write = LIBRARIES[name]
                path = Path(tempfile.mkdtemp(dir=folder))
                epochs = write(importlib.import_module(module), path, images, buffer)
                readers.append((epochs, checked(next(epochs), images, name)))
            rounds = [[cpu_rate(*reader) for reader in readers] for _ in range(REPEATS)]
        medians = [statistics.median(rates) for rates in zip(*rounds)]
        for name, median in zip(there, medians):
            cells = f"{images[0].nbytes:,} | {name} | {median:,.0f} | {medians[0] / median:.2g}"
            print(f"| {cells} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = "only print the memory for streaming this file (Linux)"
    parser.add_argument("--memory", type=Path, metavar="FILE", help=words)
    words = "only compare with MosaicML Streaming, WebDataset and litdata"
    parser.add_argument("--libraries", action="store_true", help=words)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.memory:
        try:
            print_memory(args.memory)
        except (OSError, KeyError, AttributeError, ValueError) as error:
            parser.error(f"{args.memory} cannot be streamed: {error}")
        return
    if args.libraries:
        compare_libraries()
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
