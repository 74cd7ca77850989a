"""The cases of benchmark.py: what is measured, against what, and what is aimed at.

The function of a case prepares it and returns its measurements: functions that take nothing and
return {figure: value}. The name of a figure may be "series: place".
"""

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from processes import Job
from read_speed import ROOT, load_lesson, load_tensors, make_file, make_ways, peak_memory, rate
from run_course import LAUNCHER, read_course
from torch.utils.data import DataLoader, RandomSampler
from usual_mnist import ENOUGH, make_loader

LESSONS = {x["id"]: x["file"] for x in read_course()}
USUAL = "scripts/usual_mnist.py"
DATA = ROOT / "data"
BATCH = 64  # images
LIMIT = 1200  # seconds that a command may take


class CannotMeasureError(Exception):
    """Something went wrong; the text says what, in a sentence for the user."""


class LeftOutError(Exception):
    """This machine lacks what a case needs; the text says what, in a sentence for the user."""


@dataclass(frozen=True)
class Ratio:
    """A figure of a case over another one, or a figure by itself, and what it should be."""

    what: str
    over: str
    under: str = ""
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Case:
    """Something to measure. With an axis, its figures are drawn as lines over the places."""

    name: str
    title: str
    unit: str
    prepare: Callable
    ratios: list[Ratio]
    axis: str = ""
    say: Callable | None = None  # from {figure: median} to a sentence


# Running commands as a user does


def start(*command, cwd, **variables):
    """Start a command of the repository in the folder cwd; return the Job."""
    words = [str(ROOT / x) if re.match(r"(day\d|scripts)/", str(x)) else str(x) for x in command]
    words[:1] = [sys.executable] if words[0] == "python" else words[:1]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", **variables}
    return Job(words, LIMIT, cwd=cwd, env=environment, stderr=subprocess.PIPE)


def finish(job):
    """Wait for the end of a command; return what it printed. Raise CannotMeasureError if it fails.

    Whatever happens, no process of the command goes on without this.
    """
    name = " ".join(Path(word).name for word in job.process.args[:2])
    with job:
        status = job.wait()
    if job.stopped:
        raise CannotMeasureError(f"{name} was stopped after {job.limit} s.")
    if status:
        last = (job.errors or job.output).strip().rpartition("\n")[2]
        raise CannotMeasureError(f"{name} failed: {last}")
    if job.left:
        left = "; ".join(job.left)
        raise CannotMeasureError(f"{name} has ended, but not all of its processes: {left}")
    return job.output


def run(*command, cwd, **variables):
    """Run a command of the repository in the folder cwd; return what it printed."""
    return finish(start(*command, cwd=cwd, **variables))


def find(pattern, output):
    """Return all that a pattern matches in an output. Raise CannotMeasureError if that is none."""
    found = re.findall(pattern, output, re.MULTILINE)
    if not found:
        raise CannotMeasureError(f"A lesson printed nothing like {pattern!r}:\n{output}")
    return found


def number(text):
    """Return the number that a lesson printed with a comma after the thousands."""
    return float(text.replace(",", ""))


def speed(output, begin="epoch"):
    """Return the images/s of the epochs that a lesson printed: the median without the first.

    The first epoch has the warm-up in it.
    """
    output = output.partition("now one process alone")[0]
    speeds = [number(x) for x in find(rf"^{begin} \d+: .* ([\d,]+) images/s$", output)]
    return statistics.median(speeds[1:] or speeds)


@contextlib.contextmanager
def one_thread():
    """Let torch compute with one thread in this process for a while, as one worker would."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# The cases


def images_per_second(batches, device, seconds):
    """Return how many images/s an endless row of batches gives, after a warm-up."""
    for _ in range(10):
        next(batches)
    torch.get_device_module(device).synchronize()
    images, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += len(next(batches)[1])
    torch.get_device_module(device).synchronize()
    return images / (time.perf_counter() - begin)


def seconds_of(work, device, seconds):
    """Return the median of how long work() takes, called so often that it takes seconds in all."""
    synchronize = torch.get_device_module(device).synchronize
    work()
    synchronize()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(10):  # a clock is too coarse for one
            work()
        synchronize()
        times.append((time.perf_counter() - begin) / 10)
    return statistics.median(times)


def data_path(folder, tiny):
    """Batches of normalised images on the device, in random order."""
    lesson, seconds = load_lesson(LESSONS["2"]), 0.02 if tiny else 1
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


def time_to_98(folder, tiny):
    """Whole processes, from the command to the end."""
    few = ("--epochs", "1", "--max-steps", "2") if tiny else ()

    def measure(name, *command):
        begin = time.perf_counter()
        output = run("python", *command, *few, cwd=folder)
        seconds = time.perf_counter() - begin
        right = float(find(r"^=> .*?([\d.]+)% of", output)[-1])
        if right < 100 * ENOUGH and not tiny:
            raise CannotMeasureError(f"{name} reached only {right}%, so its time says nothing.")
        return {name: seconds}

    return [
        partial(measure, "lesson 2", LESSONS["2"]),
        partial(measure, "the usual script", USUAL, DATA),
    ]


def per_parameter(folder):
    """Write a copy of lesson 4 that averages the gradients one by one. Return its path."""
    one_by_one = '''def average_gradients(model):
    """Replace each gradient by its mean over the ranks, each in a message of its own."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


'''
    return changed("4", r"def average_gradients.*?\n\n\n", one_by_one, folder)


def changed(lesson, pattern, text, folder):
    """Write a copy of a lesson in which what a pattern matches is another text; return its path."""
    source = (ROOT / LESSONS[lesson]).read_text()
    source, count = re.subn(pattern, lambda match: text, source, flags=re.DOTALL | re.MULTILINE)
    if count != 1:
        raise CannotMeasureError(f"Lesson {lesson} has changed: there is no {pattern!r} in it.")
    path = folder / Path(LESSONS[lesson]).name
    path.write_text(source)
    return path


INDEPENDENT, DDP = "lesson 2 twice, independent", "lesson 6, DistributedDataParallel"
BY_HAND, BY_PARAMETER = "lesson 4, by hand, one message", "by hand, a message a parameter"
LARGE = 512  # images


def ddp(folder, tiny):
    """Two ranks against two processes that know nothing of each other, on the same cores."""
    threads = str(max(1, torch.get_num_threads() // 2))

    def options(batch):
        epochs, steps = (1, 2) if tiny else (4, 6400 // batch)
        few = ("--epochs", epochs, "--max-steps", steps, "--batch-size", batch)
        return (*few, "--data-dir", DATA)

    def independent(batch):
        command = ("python", LESSONS["2"], *options(batch))
        both = [start(*command, cwd=folder, OMP_NUM_THREADS=threads) for _ in range(2)]
        return {f"{INDEPENDENT}: {batch}": sum(speed(finish(job)) for job in both)}

    def together(name, file, batch):
        return {f"{name}: {batch}": speed(run("python", file, "2", *options(batch), cwd=folder))}

    one_by_one = per_parameter(folder)
    if tiny:
        return [partial(independent, BATCH), partial(together, BY_PARAMETER, one_by_one, BATCH)]
    measurements = []
    for batch in (BATCH, LARGE):
        measurements += [partial(independent, batch), partial(together, DDP, LESSONS["6"], batch)]
        if batch == BATCH:
            measurements += [
                partial(together, BY_HAND, LESSONS["4"], batch),
                partial(together, BY_PARAMETER, one_by_one, batch),
            ]
    return measurements


SAME_EACH, SAME_ALL = "weak: 256 images a process", "strong: 256 images in all"
ALL_CORES = "one process, all cores"
APART = "256 images a process, independent"


def scaling(folder, tiny):
    """Lesson 7: all processes against one, which has one process's share of the cores.

    Weak: each process does as many steps as one alone, of the same size. Strong: they share each.
    """
    steps = 2 if tiny else 60

    def measure(series, processes, batch_size, *counts):
        options = ("--epochs", 1, "--max-steps", steps, "--batch-size", batch_size)
        output = run("python", LESSONS["7"], processes, *options, cwd=folder)
        rows = find(r"^processes: (\d+), .* ([\d,]+) images/s$", output)
        return {f"{series}: {n}": number(x) for n, x in rows if int(n) in counts}

    def apart():
        """What the machine gives to two processes that do not wait for each other."""
        options = ("--epochs", 1, "--max-steps", steps, "--batch-size", 256)
        command, threads = ("python", LESSONS["7"], 1), str(max(1, torch.get_num_threads() // 2))
        both = [start(*command, *options, cwd=folder, OMP_NUM_THREADS=threads) for _ in range(2)]
        rows = [find(r"^processes: 1, .* ([\d,]+) images/s$", finish(x))[0] for x in both]
        return {f"{APART}: 2": sum(map(number, rows))}

    measurements = [partial(measure, SAME_EACH, 2, 256, 1, 2)]
    if not tiny:
        measurements += [
            partial(measure, SAME_EACH, 4, 256, 4),
            partial(measure, SAME_ALL, 2, 128, 2),
            partial(measure, SAME_ALL, 4, 64, 4),
            partial(measure, ALL_CORES, 1, 256, 1),
            apart,
        ]
    return measurements


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


SIZES = {f"{kilobytes} kB": 250 * kilobytes for kilobytes in (1, 4, 16, 64, 256)}
SIZES |= {f"{megabytes} MB": 250_000 * megabytes for megabytes in (1, 4, 16, 64)}


def all_reduce(folder, tiny):
    """Lesson 1 with more sizes, two ranks; and a copy from memory to memory with one thread."""
    sizes = dict(list(SIZES.items())[:4]) if tiny else SIZES
    file = changed("1", r"^SIZES = .*?$", f"SIZES = {sizes}", folder)

    def measure():
        output = run("python", file, "2", cwd=folder)
        rows = find(r"^ *(\d+ [kM]B): .* bus +([\d.,]+) MB/s$", output)
        return {f"all_reduce: {size}": number(speed) for size, speed in rows}

    def copy():
        speeds = {}
        for size, numbers in sizes.items():
            target, source = torch.zeros(numbers), torch.ones(numbers)
            with one_thread():
                seconds = seconds_of(partial(target.copy_, source), torch.device("cpu"), 0.05)
            speeds[f"copy: {size}"] = 4 * numbers / seconds / 1e6
        return speeds

    return [measure, copy]


def start_up(folder, tiny):
    """Seconds until a lesson prints its first result, made by one step on each rank."""
    few = ("--epochs", "1", "--max-steps", "1")

    def until(name, pattern, *command):
        begin, seconds = time.perf_counter(), None
        job = start("python", *command, cwd=folder)
        for line in job.lines():
            if re.match(pattern, line):
                seconds = time.perf_counter() - begin
                break
        finish(job)
        if seconds is None:
            raise CannotMeasureError(f"{command[0]} printed no line like {pattern!r}.")
        return {name: seconds}

    def imports():
        begin = time.perf_counter()
        run("python", "-c", "import torch", cwd=folder)
        return {"import torch, and no more": time.perf_counter() - begin}

    measurements = [
        imports,
        partial(until, "lesson 2", "epoch 0", LESSONS["2"], *few),
    ]
    if not tiny:
        measurements += [
            partial(until, "lesson 0", "rank 0 of", LESSONS["0"]),
            partial(until, "lesson 6", "epoch 0", LESSONS["6"], *few),
        ]
    return measurements


def course(folder, tiny):
    """All lessons, or lesson 0. Once: it takes minutes."""
    lessons = ("0",) if tiny else ()

    def measure():
        output = run("scripts/run_course.sh", *lessons, cwd=folder)
        each = find(r"^ *(\S+)  =>.* (\d+\.\d)  ok$", output)
        total = float(find(r"^\d+ of \d+ lessons ok,.* (\d+) seconds", output)[0])
        return {"all lessons": total, **{f"lesson {name}": float(x) for name, x in each}}

    return [measure]


def training_step(lesson, device):
    """Return a function that trains lesson 2's Net with a batch on the device: (images, labels)."""
    torch.manual_seed(0)
    model = lesson.Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images, labels):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def capture(step, images, labels):
    """Return a function that does a step as one CUDA graph: one launch for all of its kernels."""
    side = torch.cuda.Stream()  # warm-up and capture want a stream of their own
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(images, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(images, labels)
    return graph.replay


def count_launches(step, images, labels):
    """Return how many kernels a step launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(images, labels)
        torch.cuda.synchronize()
    launches = re.compile(r"(cuda|cu|hip)(Ext)?(Module)?LaunchKernel")
    return sum(x.count for x in profiler.key_averages() if launches.match(x.key))


def gpu(folder, tiny):
    """Lesson 2 on one GPU, the same Net fed by torchvision, and how fast its step could be."""
    if not torch.cuda.is_available():
        raise LeftOutError("There is no GPU here.")
    lesson, device = load_lesson(LESSONS["2"]), torch.device("cuda", 0)
    images, labels = (x[:BATCH].to(device) for x in load_tensors()[:2])
    one = torch.zeros(1, device=device)
    seconds = 0.1 if tiny else 3

    def lesson_2():
        output = run("python", LESSONS["2"], "--epochs", "4", cwd=folder, CUDA_VISIBLE_DEVICES="0")
        return {"lesson 2": speed(output)}

    def fed_by_torchvision():
        step = training_step(lesson, device)
        loader = make_loader(DATA, train=True, batch_size=BATCH)

        def trained():
            while True:
                for x, y in loader:
                    step(x[:, 0].to(device), y.to(device))  # normalised twice: no less work
                    yield x, y

        return {"the same Net, torchvision": images_per_second(trained(), device, seconds)}

    def bare():
        step = partial(training_step(lesson, device), images, labels)
        return {"step alone, no data": BATCH / seconds_of(step, device, seconds)}

    def captured():
        step = capture(training_step(lesson, device), images, labels)
        return {"step as a graph": BATCH / seconds_of(step, device, seconds)}

    def launches():
        step = training_step(lesson, device)
        step(images, labels)  # the first step allocates
        count = count_launches(step, images, labels)
        each = seconds_of(lambda: [one.add_(1) for _ in range(100)], device, 0.2) / 100
        print(f"   a step launches {count} kernels; one launch takes {each * 1e6:.1f} us")
        return {"launches x time of one": BATCH / (max(1, count) * each)}

    return [lesson_2, fed_by_torchvision, bare, captured, launches]


def limit_of_a_step(medians):
    """Return a sentence on what a step of lesson 2 waits for on this GPU."""
    gain = medians["step as a graph"] / medians["step alone, no data"]
    if gain > 2:
        limit = "the time to launch its kernels, one by one"
    else:
        limit = "the work of the GPU itself"
    return f"The limit of a step is {limit}: launched at once, it is {gain:.1f} times as fast."


CACHED = "in the page cache: "
CASES = [
    Case(
        "data",
        f"Data path: batches of {BATCH} normalised images, one thread a process",
        "images/s",
        data_path,
        [
            Ratio("lessons / torchvision", "the lessons", "torchvision, 0 workers", at_least=40),
            Ratio("lessons / torchvision, 2 workers", "the lessons", "torchvision, 2 workers"),
            Ratio("by one index / lessons", "a batch by one index", "the lessons"),
        ],
    ),
    Case(
        "time-to-98",
        "Time to 98% of the test images right: whole processes",
        "s",
        time_to_98,
        [Ratio("usual script / lesson 2", "the usual script", "lesson 2", at_least=8)],
    ),
    Case(
        "ddp",
        f"Two ranks against the machine's limit: batches of {BATCH} and {LARGE}",
        "images/s",
        ddp,
        [
            Ratio(
                f"DDP / independent, batches of {batch}",
                f"{DDP}: {batch}",
                f"{INDEPENDENT}: {batch}",
                at_least=0.95,
            )
            for batch in (BATCH, LARGE)
        ]
        + [
            Ratio(f"{what} / independent", f"{name}: {BATCH}", f"{INDEPENDENT}: {BATCH}")
            for what, name in (
                ("by hand, one message", BY_HAND),
                ("a message a parameter", BY_PARAMETER),
            )
        ],
        axis="images in a batch",
    ),
    Case(
        "scaling",
        "Scaling of lesson 7",
        "images/s",
        scaling,
        [
            Ratio(
                "2 / 1 process, weak scaling", f"{SAME_EACH}: 2", f"{SAME_EACH}: 1", at_least=1.8
            ),
            Ratio("2 independent / 1 process", f"{APART}: 2", f"{SAME_EACH}: 1"),
            Ratio("2 / 1 process on all cores, weak", f"{SAME_EACH}: 2", f"{ALL_CORES}: 1"),
            Ratio("4 / 1 process, weak scaling", f"{SAME_EACH}: 4", f"{SAME_EACH}: 1"),
            Ratio("2 / 1 process, strong scaling", f"{SAME_ALL}: 2", f"{SAME_EACH}: 1"),
            Ratio("4 / 1 process, strong scaling", f"{SAME_ALL}: 4", f"{SAME_EACH}: 1"),
        ],
        axis="processes",
    ),
    Case(
        "read",
        "Reading files of several layouts: one process, one thread",
        "images/s",
        reading,
        [
            Ratio("whole chunks / one at a time", CACHED + WHOLE, CACHED + ONE, at_least=50),
            Ratio("the same, gzip", CACHED + GZIP_WHOLE, CACHED + GZIP_ONE, at_least=50),
            Ratio("the same, from disk", f"from disk: {WHOLE}", f"from disk: {ONE}", at_least=50),
            Ratio("whole chunks / not chunked", CACHED + WHOLE, CACHED + PLAIN_ONE),
            Ratio("whole chunks / memmap", CACHED + WHOLE, CACHED + "memmap, one at a time"),
            Ratio("whole chunks / LMDB", CACHED + WHOLE, CACHED + "LMDB, one at a time"),
            Ratio(
                "whole chunks / WebDataset",
                CACHED + WHOLE,
                CACHED + "WebDataset, in order, then shuffled",
            ),
        ],
    ),
    Case(
        "streaming",
        "Lesson 11: an epoch from the file and one from memory, two ranks",
        "images/s",
        streaming,
        [Ratio("streamed / from memory", "streamed", "from memory", at_least=0.95)],
    ),
    Case(
        "memory",
        "The most memory that reading a file takes",
        "MB",
        memory,
        [
            Ratio(f"{copies} x MNIST / 1 x", f"streamed: {copies}", "streamed: 1", at_most=1.05)
            for copies in COPIES[1:]
        ],
        axis="size of the file, times MNIST",
    ),
    Case(
        "all_reduce",
        "Bus bandwidth of all_reduce, two ranks, beside a copy in memory",
        "MB/s",
        all_reduce,
        [
            Ratio(f"all_reduce / copy, {size}", f"all_reduce: {size}", f"copy: {size}")
            for size in ("4 kB", "1 MB", "64 MB")
        ],
        axis="size",
    ),
    Case(
        "start",
        "Start-up: until the first step is done",
        "s",
        start_up,
        [
            Ratio(f"{x} / import torch", x, "import torch, and no more")
            for x in ("lesson 0", "lesson 2", "lesson 6")
        ],
    ),
    Case(
        "course",
        "The whole course, without set-up",
        "s",
        course,
        [Ratio("run_course.sh, seconds", "all lessons", at_most=360)],
    ),
    Case(
        "gpu",
        f"Lesson 2 on a GPU, batches of {BATCH}, and what limits it",
        "images/s",
        gpu,
        [
            Ratio("lesson 2 / torchvision", "lesson 2", "the same Net, torchvision", at_least=20),
            Ratio("lesson 2 / step alone", "lesson 2", "step alone, no data"),
            Ratio("step alone / launches", "step alone, no data", "launches x time of one"),
            Ratio("step alone / graph", "step alone, no data", "step as a graph"),
        ],
        say=limit_of_a_step,
    ),
]
