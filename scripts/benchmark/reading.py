"""The cases about reading data."""

import itertools
import os
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch
from course.lists import LAUNCHER, load
from torch.utils.data import DataLoader, RandomSampler

from benchmark.commands import (
    BATCH,
    DATA,
    LESSONS,
    LeftOutError,
    images_per_second,
    one_thread,
    run,
    speed,
)
from benchmark.layouts import load_tensors, make_file, make_ways, peak_memory, rate
from benchmark.usual_mnist import make_loader


def data_path(folder, tiny):
    """Batches of normalised images on the device, in random order."""
    lesson, seconds = load(LESSONS["2"]), 0.02 if tiny else 1
    device, _ = lesson.choose_device(local_rank=0, local_world_size=1)
    train_set, _ = lesson.load_mnist(DATA)
    images, labels = (tensor.to(device) for tensor in train_set.tensors)

    def normal(images):  # as the Net of the lessons begins
        return (images.unsqueeze(1) / 255 - 0.1307) / 0.3081

    def of_the_lessons():
        for x, y in DataLoader(train_set, BATCH, sampler=RandomSampler(train_set)):
            yield normal(x.to(device)), y.to(device)

    def by_index():
        for indices in torch.randperm(len(images), device=device).split(BATCH):
            yield normal(images[indices]), labels[indices]

    def from_loader(loader):
        for x, y in loader:
            yield x.to(device), y.to(device)

    def measure(name, epoch, *arguments):
        with one_thread():
            endless = itertools.chain.from_iterable(epoch(*arguments) for _ in itertools.count())
            return {name: images_per_second(endless, device, seconds)}

    measurements = [
        partial(measure, "the lessons", of_the_lessons),
        partial(measure, "a batch by one index", by_index),
    ]
    return measurements + [
        partial(
            measure,
            f"torchvision, {workers} workers",
            from_loader,
            make_loader(DATA, train=True, batch_size=BATCH, workers=workers),
        )
        for workers in ((0,) if tiny else (0, 1, 2))
    ]


def can_empty_cache(path):
    """Return whether the page cache can be emptied of a file, so that it is read from disk."""
    try:
        empty_cache([path])
        before = bytes_from_disk()
        path.read_bytes()
        return bytes_from_disk() - before > 0.9 * path.stat().st_size
    except (AttributeError, OSError):  # another system than Linux
        return False


def empty_cache(paths):
    """Empty the page cache of these files, and of nothing else."""
    for path in paths:
        with open(path) as file:
            os.fsync(file)  # only what is on the disk can leave the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk():
    """Return how many bytes this process has had read from disks."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])


ONE, WHOLE = "HDF5, chunks of 256, one at a time", "HDF5, chunks of 256, whole chunks"
PLAIN_ONE = "HDF5, not chunked, one at a time"
GZIP_ONE, GZIP_WHOLE = (x.replace("256,", "256, gzip 4,") for x in (ONE, WHOLE))


def reading(folder, tiny):
    """Read files of several layouts, as read_speed.py does: one process, one thread."""
    tensors = load_tensors()
    tensors, seconds = ([x[:3000] for x in tensors], 0.01) if tiny else (tensors, 0.4)
    ways = make_ways(folder, tensors)
    missing = [name for name in ("webdataset", "lmdb") if not find_spec(name)]
    if missing:
        print(f"   left out: {', '.join(missing)}. To measure: pip install {' '.join(missing)}")
    cold = can_empty_cache(ways[0][-1][0])
    if not cold:
        print("   left out: reading from disk. The page cache cannot be emptied of a file here")

    def measure(state, layout, how, _, read, files):
        epochs = None
        if state == "from disk":
            empty_cache(files)
            epochs = 1  # for the second one they would be in the cache
        with one_thread():
            return {f"{state}: {layout}, {how}": rate(read, seconds, epochs)}

    states = ("in the page cache", "from disk") if cold else ("in the page cache",)
    return [partial(measure, state, *way) for way in ways for state in states]


def streaming(folder, tiny):
    """Lesson 11 on one imitated node with two ranks: it trains from the file, then from memory."""
    tensors = load_tensors()
    path = make_file(folder / "mnist.h5", tensors)
    ranks, few = ("1x1", ("--max-steps", 2)) if tiny else ("1x2", ("--epochs", 4))

    def measure():
        output = run(LAUNCHER, "--local", ranks, "11", "--file", path, *few, cwd=folder)
        streamed, _, memory = output.partition("now the same batches from memory")
        return {"streamed": speed(streamed), "from memory": speed(memory)}

    return [measure]


COPIES = (1, 5, 20)


def memory(folder, tiny):
    """Files of 1, 5 and 20 times MNIST, each read to its end by a new process."""
    if not Path("/proc/self/status").exists():
        raise LeftOutError("Only Linux says how much memory a process has held.")
    tensors = load_tensors()
    if tiny:
        tensors = [x[:3000] for x in tensors]

    def measure(series, copies, path):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            held = pool.submit(peak_memory, path, series == "as a whole").result()
        return {f"{series}: {copies}": held}

    measurements = []
    for copies in COPIES[:2] if tiny else COPIES:
        path = make_file(folder / f"mnist{copies}.h5", tensors, copies=copies)
        measurements.append(partial(measure, "streamed", copies, path))
        if not tiny:
            measurements.append(partial(measure, "as a whole", copies, path))
    return measurements
