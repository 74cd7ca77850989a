"""The cases about training and about messages between ranks."""

import re
import time
from functools import partial

import torch

from benchmark.commands import (
    BATCH,
    DATA,
    LESSONS,
    CannotMeasureError,
    changed,
    find,
    finish,
    number,
    one_thread,
    run,
    seconds_of,
    speed,
    start,
)
from benchmark.usual_mnist import ENOUGH

USUAL = "scripts/benchmark/usual_mnist.py"


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

    Weak scaling: the batch per process stays. Strong scaling: the global batch stays.
    """
    steps = 2 if tiny else 60
    options = ("--rounds", 1, "--max-steps", steps)

    def measure(processes, names):
        """Return {a name of the case: images/s}. names: {a row of lesson 7's table: the name}."""
        output = run("python", LESSONS["7"], processes, *options, cwd=folder)
        return {names[x]: speed for x, speed in speeds(output).items() if x in names}

    def apart():
        """What the machine gives to two processes that do not wait for each other."""
        command, threads = ("python", LESSONS["7"], 1), str(max(1, torch.get_num_threads() // 2))
        both = [start(*command, *options, cwd=folder, OMP_NUM_THREADS=threads) for _ in range(2)]
        return {f"{APART}: 2": sum(speeds(finish(x))["one process"] for x in both)}

    two = {"one process": f"{SAME_EACH}: 1", "weak scaling": f"{SAME_EACH}: 2"}
    four = {"weak scaling": f"{SAME_EACH}: 4", "strong scaling": f"{SAME_ALL}: 4"}
    if tiny:
        return [partial(measure, 2, two)]
    two |= {"strong scaling": f"{SAME_ALL}: 2", ALL_CORES: f"{ALL_CORES}: 1"}
    return [partial(measure, 2, two), partial(measure, 4, four), apart]


def speeds(output):
    """Return the images/s of each setting in lesson 7's table, {setting: images/s}."""
    rows = find(r"^(one process.*?|\w+ scaling) +\d.* ([\d,]+)  [\d.]+ \(.*\)$", output)
    return {name: number(speed) for name, speed in rows}


SIZES = {f"{kilobytes} kB": 250 * kilobytes for kilobytes in (1, 4, 16, 64, 256)}
SIZES |= {f"{megabytes} MB": 250_000 * megabytes for megabytes in (1, 4, 16, 64)}


def all_reduce(folder, tiny):
    """Lesson 1 with more sizes, two ranks; and a copy from memory to memory with one thread."""
    sizes = dict(list(SIZES.items())[:4]) if tiny else SIZES
    file = changed("1", r"^SIZES = .*?$", f"SIZES = {sizes}", folder)

    def measure():
        output = run("python", file, "2", cwd=folder)
        rows = find(r"^ *(\d+ [kM]B): .* \(bus +([\d.,]+)\)$", output)
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
