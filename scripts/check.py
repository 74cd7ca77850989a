"""Check an exercise: start it on its ranks and see what each of them really does.

Without an id: list the exercises and which of them have passed. The list of the exercises, with
their hints, is exercises.toml. Reading it there takes the fun out of it: ask with --hint.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".cache" / "exercises.json"
MARKS = {True: "ok", False: "NO", None: "->"}  # None: what follows from it
START_LIMIT, RUN_LIMIT = 120, 20  # seconds: until all ranks stand, and until all are done


class Ended(Exception):
    """A rank did not come to its end. Its text says which rank, and what it said last."""


# Each exercise has a function look_..., which runs on every rank and returns what it saw there, and
# a function judge_..., which gets the list of that, one a rank, and yields (right, sentence).


def close(a, b, tolerance=1e-4):
    """Return whether two lists of numbers are the same, but for rounding."""
    return len(a) == len(b) and all(abs(x - y) <= tolerance * (1 + abs(y)) for x, y in zip(a, b))


def short(values):
    """Return a list of numbers as a short text."""
    text = ", ".join(f"{value:.4g}" for value in values[:6])
    return f"{text}, ..." if len(values) > 6 else text


def ranks(seen, test):
    """Return the ranks for which test(what the rank saw) is true, as a list."""
    return [rank for rank, mine in enumerate(seen) if test(mine)]


def names(numbers):
    """Return "rank 0" or "rank 0, 2" for some ranks."""
    return "rank " + ", ".join(map(str, numbers))


@contextlib.contextmanager
def counted(name):
    """Count the calls of a collective, such as all_reduce: give a list of their lengths."""
    import torch.distributed as dist

    original, calls = getattr(dist, name), []

    def counting(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return original(tensor, *arguments, **options)

    setattr(dist, name, counting)
    try:
        yield calls
    finally:
        setattr(dist, name, original)


def shared_folder(rank):
    """Return a folder that is new and the same for all ranks."""
    import torch.distributed as dist

    folder = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def flat(model):
    """Return all parameters of a model as one list of numbers."""
    return [x for parameter in model.parameters() for x in parameter.detach().flatten().tolist()]


# 0.1: the mean over all ranks


def look_0_1(exercise, rank, world_size):
    import torch

    value = torch.tensor([float(rank), 10.0 * rank * rank])
    return exercise.mean(value).tolist(), value.tolist()


def judge_0_1(seen):
    numbers = range(len(seen))
    expected = [sum(numbers) / len(seen), sum(10 * n * n for n in numbers) / len(seen)]
    for rank, (result, value) in enumerate(seen):
        own = [rank, 10.0 * rank * rank]
        yield (
            close(result, expected),
            f"rank {rank}: mean({short(own)}) gave {short(result)}; over all ranks it is "
            f"{short(expected)}",
        )
        yield close(value, own), f"rank {rank}: the tensor itself holds {short(value)} afterwards"


# 0.2: a collective on rank 0 only


def look_0_2(exercise, rank, world_size):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=3))
    images, printed, begin = torch.tensor(500.0 + 7 * rank), io.StringIO(), time.monotonic()
    dist.barrier()
    with counted("all_reduce") as calls, contextlib.redirect_stdout(printed):
        _, error = attempt(exercise.report, images, group)
    return len(calls), error, printed.getvalue().strip(), time.monotonic() - begin


def judge_0_2(seen):
    total = sum(500 + 7 * rank for rank in range(len(seen)))
    for rank, (calls, error, _, seconds) in enumerate(seen):
        if error:
            yield False, f"rank {rank}: waited {seconds:.0f} s, then {error}"
        else:
            yield calls > 0, f"rank {rank}: all_reduce was called, number of times: {calls}"
    absent = ranks(seen, lambda mine: mine[0] == 0)
    if absent:
        yield False, f"{names(absent)} did not take part: they never called all_reduce"
    else:
        printed = [mine[2] for mine in seen]
        yield f"{total:g}" in printed[0], f"rank 0 printed {printed[0]!r}; the sum is {total:g}"
        loud = ranks(printed[1:], bool)
        yield not loud, f"ranks other than 0 that printed something: {len(loud)}"


# 1.1: all ranks on device 0


def look_1_1(exercise, rank, world_size):
    device = exercise.choose_device(rank)
    return device.type, 0 if device.index is None else device.index, str(device)


def judge_1_1(seen):
    indices = [index for _, index, _ in seen]
    for rank, (kind, index, text) in enumerate(seen):
        others = [r for r in range(len(seen)) if indices[r] == index and r != rank]
        shared = f"shared with {names(others)}" if others else "for it alone"
        right = kind == "cuda" and index < len(seen) and not others
        yield right, f"rank {rank}: {text}, {shared}"


# 2.1: one epoch of training


def look_2_1(exercise, rank, world_size):
    import torch
    from torch.nn.functional import mse_loss

    results, x = [], torch.linspace(-1, 1, 10)[:, None]
    batches = list(zip(x.split(4), (2 * x - 1).split(4)))
    for mine in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        first, losses = flat(model), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if mine:
            result = exercise.train_one_epoch(model, optimizer, batches)
        else:
            for x, y in batches:
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                losses += [loss.item()] * len(x)
            result = sum(losses) / len(losses)
        results.append((first, flat(model), float(result)))
    return results


def judge_2_1(seen):
    (first, mine, loss), (_, expected, mean) = seen[0]
    moved = mine != first
    yield moved, f"rank 0: the parameters {'have moved' if moved else 'are still the first ones'}"
    yield (
        close(mine, expected),
        f"rank 0: after batches of 4, 4 and 2 they are {short(mine)}; right: {short(expected)}",
    )
    if moved:
        yield close([loss], [mean]), f"rank 0: mean loss {loss:.4f}; over all points {mean:.4f}"


# 3.1: every rank unpacks at once


def look_3_1(exercise, rank, world_size):
    import gzip

    import torch.distributed as dist

    archive = exercise.DATA / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz"
    folder, original, calls = shared_folder(rank), exercise.unpack, []

    def unpack(*arguments):
        calls.append(rank)
        original(*arguments)

    exercise.unpack = unpack
    expected = list(gzip.decompress(archive.read_bytes())[8:])
    dist.barrier()
    time.sleep(0.15 * rank)  # ranks never arrive at the same moment
    labels = exercise.load_labels(archive, folder / "labels").tolist()
    return len(calls), len(labels), labels == expected


def judge_3_1(seen):
    for rank, (calls, count, right) in enumerate(seen):
        whole = "the right ones" if right else "not all, or not the right ones"
        by = ", which it unpacked itself" if calls else ""
        yield right, f"rank {rank}: read {count:,} of 10,000 labels{by}: {whole}"
    calls = sum(mine[0] for mine in seen)
    yield calls == 1, f"all ranks: the archive was unpacked to this path {calls} times"


# 4.1: gradients summed, not averaged


def look_4_1(exercise, rank, world_size):
    import torch

    model = torch.nn.Linear(3, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    exercise.average_gradients(model, world_size)
    gradients = [x for p in model.parameters() for x in p.grad.flatten().tolist()]
    return gradients, exercise.train(rank, world_size), exercise.train(0, 1)[-1]


def judge_4_1(seen):
    mean = (len(seen) + 1) / 2
    for rank, (gradients, _, _) in enumerate(seen):
        ratio = gradients[0] / mean
        yield (
            close(gradients, [mean] * 4),
            f"rank {rank}: gradient {1 + rank} became {gradients[0]:g}; the mean over the ranks is "
            f"{mean:g}" + (f": every step is {ratio:.2g} times too long" if ratio > 1.01 else ""),
        )
    last, alone = max(losses[-1] for _, losses, _ in seen), seen[0][2]
    begin = seen[0][1][0]
    yield (
        max(last, alone) < begin / 1000,
        f"all ranks: loss {begin:.2g} in the first step, at most {last:.2g} in the last one "
        f"(one process alone: {alone:.2g})",
    )


# 4.2: set_epoch forgotten


def look_4_2(exercise, rank, world_size):
    import torch

    return exercise.train(torch.arange(40.0), 3, 2, rank, world_size)[1]


def judge_4_2(seen):
    for rank, epochs in enumerate(seen):
        same = epochs[0] == epochs[1] or epochs[1] == epochs[2]
        first, second = (short(order[:4]) for order in epochs[:2])
        again = "and again" if same else "but"
        end = "the order never changes" if same else "a new order"
        yield (
            not same,
            f"rank {rank}: numbers {first}, ... in epoch 0 {again} {second}, ... in epoch 1: {end}",
        )
    for epoch in range(3):
        visits = sorted(number for epochs in seen for number in epochs[epoch])
        once = visits == [float(number) for number in range(40)]
        yield once, f"all ranks: each number once in epoch {epoch}: {'yes' if once else 'no'}"


# 4.3: different first weights


def look_4_3(exercise, rank, world_size):
    import torch

    x = torch.linspace(-2, 2, 32)[:, None]
    y = torch.sin(x)
    model = exercise.train(x, y, rank, world_size)
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    return flat(model), loss, y.square().mean().item()


def judge_4_3(seen):
    first = seen[0][0]
    for rank, (parameters, loss, begin) in enumerate(seen):
        gap = max(abs(x - y) for x, y in zip(parameters, first))
        yield gap < 1e-6, f"rank {rank}: its parameters differ from rank 0's by up to {gap:.2g}"
        if gap < 1e-6:
            learned = loss < begin / 20
            yield learned, f"rank {rank}: loss {loss:.2g} (a model that says 0: {begin:.2g})"


# 4.4: a sampler by hand


def look_4_4(exercise, rank, world_size):
    parts = [exercise.my_part(20, epoch, rank, world_size).tolist() for epoch in range(2)]
    return parts, exercise.my_part(21, 0, rank, world_size).tolist()


def judge_4_4(seen):
    size = 20 // len(seen)
    for rank, (parts, more) in enumerate(seen):
        for count, part, right in ((20, parts[0], size), (21, more, 21 // len(seen))):
            yield len(part) == right, f"rank {rank}: {len(part)} of {count} images; fair is {right}"
        yield parts[0] != parts[1], f"rank {rank}: images {short(parts[0])}, then {short(parts[1])}"
        mixed = any(x > y for x, y in zip(parts[0], parts[0][1:]))
        yield mixed, f"rank {rank}: {'shuffled' if mixed else 'not shuffled'}"
    for epoch in range(2):
        visits = [image for parts, _ in seen for image in parts[epoch]]
        twice = len(visits) - len(set(visits))
        yield twice == 0, f"all ranks: {twice} images went to more than one rank in epoch {epoch}"
    yield set(visits) <= set(range(20)), "all ranks: only images that there are"


# 5.1: profiler.step() forgotten


def look_5_1(exercise, rank, world_size):
    import torch.distributed as dist

    folder = shared_folder(rank)
    exercise.record(folder)
    dist.barrier()
    files = list(folder.glob(f"*rank{rank}.*"))
    events = [e for file in files for e in json.loads(file.read_text())["traceEvents"]]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
    return len(files), len(steps), sum(e.get("name") == "gloo:all_reduce" for e in events)


def judge_5_1(seen):
    for rank, (files, steps, messages) in enumerate(seen):
        yield files == 1, f"rank {rank}: traces that bear its name: {files}"
        if files:
            yield steps == 3, f"rank {rank}: steps in its trace: {steps}; the plan says 3"
            yield messages >= 3, f"rank {rank}: all_reduce calls in its trace: {messages}"


# 6.1: averaging by hand left inside DistributedDataParallel


def look_6_1(exercise, rank, world_size):
    with counted("all_reduce") as calls:
        model, _ = exercise.train(rank, world_size, 10)
    alone, losses = exercise.train(0, 1, 10)
    gap = max(abs(x - y) for x, y in zip(flat(model), flat(alone)))
    return calls, gap, losses[[0, -1]].tolist()


def judge_6_1(seen):
    for rank, (calls, gap, losses) in enumerate(seen):
        yield (
            gap < 1e-5,
            f"rank {rank}: parameters within {gap:.0e} of those of one process",
        )
        yield (
            losses[1] < losses[0],
            f"rank {rank}: loss of one process {losses[0]:.4f} at first, {losses[1]:.4f} at last",
        )
        yield (
            not calls,
            f"rank {rank}: all_reduce called by hand {len(calls)} times in 10 steps, "
            f"{sum(calls):,} numbers, besides what DistributedDataParallel sends",
        )


# 6.2: a checkpoint saved by all ranks to one file


def look_6_2(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    path, original, calls = shared_folder(rank) / "checkpoint.pt", torch.save, []

    def save(thing, file, *arguments, **options):
        calls.append(str(file))
        time.sleep(0.3)  # a large model on a slow disk: who does not wait reads too early
        original(thing, file, *arguments, **options)

    torch.save = save
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    exercise.save(model, path)
    state, error = attempt(torch.load, path)
    return len(calls), error, None if error else state["weight"].item()


def judge_6_2(seen):
    writers = ranks(seen, lambda mine: mine[0] > 0)
    for rank, (calls, error, weight) in enumerate(seen):
        wrote = f"wrote the file {calls} times" if calls else "did not write"
        read = f"could not read it: {error}" if error else f"read rank {weight:.0f}'s weights"
        yield not error and calls <= 1 and len(writers) == 1, f"rank {rank}: {wrote}, then {read}"
    yield len(writers) == 1, f"all ranks: one file, written by {names(writers) or 'nobody'}"


# 6.3: names that begin with module.


def look_6_3(exercise, rank, world_size):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    folder = shared_folder(rank)
    torch.manual_seed(3)
    model = DistributedDataParallel(exercise.make_model())
    exercise.save(model, folder / "checkpoint.pt")
    torch.manual_seed(4)
    loaded, error = attempt(exercise.load, folder / "checkpoint.pt")
    saved, _ = attempt(torch.load, folder / "checkpoint.pt")
    torch.save({"another.weight": torch.zeros(1)}, folder / f"wrong{rank}.pt")
    _, refusal = attempt(exercise.load, folder / f"wrong{rank}.pt")
    return flat(model), error or flat(loaded), list(saved or [None]), refusal


def judge_6_3(seen):
    for rank, (trained, loaded, written, refusal) in enumerate(seen):
        if isinstance(loaded, str):
            yield False, f"rank {rank}: the checkpoint cannot be loaded: {loaded}"
        else:
            same = sum(x == y for x, y in zip(trained, loaded))
            yield (
                close(trained, loaded, 0) and bool(trained),
                f"rank {rank}: {same} of {len(trained)} numbers are right after loading; "
                f"the first name in the file is {written[0]}",
            )
        how = "an error" if refusal else "no error"
        yield (
            bool(refusal),
            f"rank {rank}: loading a checkpoint whose names do not fit: {how}",
        )


# 6.4: the optimiser left out of the checkpoint


def look_6_4(exercise, rank, world_size):
    path = shared_folder(rank) / "checkpoint.pt"
    first = exercise.begin()
    losses = exercise.train(*first, 10)
    exercise.save(path, *first)
    stopped = flat(first[0])
    exercise.train(*first, 10)
    second = exercise.begin()
    exercise.load(path, *second)
    loaded = flat(second[0])
    exercise.train(*second, 10)
    return stopped, loaded, flat(first[0]), flat(second[0]), losses[0] > losses[-1]


def judge_6_4(seen):
    for rank, (stopped, loaded, straight, resumed, learns) in enumerate(seen):
        yield learns, f"rank {rank}: the loss falls in the first 10 steps"
        gaps = [
            max(abs(x - y) for x, y in zip(*p)) for p in ((stopped, loaded), (straight, resumed))
        ]
        yield gaps[0] == 0, f"rank {rank}: weights after loading differ by {gaps[0]:.2g}"
        yield gaps[1] < 1e-6, f"rank {rank}: weights 10 steps later differ by {gaps[1]:.2g}"


# 6.5: batch normalisation with every rank's own statistics


def look_6_5(exercise, rank, world_size):
    import torch

    whole = torch.arange(4.0 * world_size)[:, None].square() / 10
    weights = torch.linspace(-1, 2, len(whole))[:, None].cos()
    mine, expected = whole.clone(), whole.clone().requires_grad_()
    part = mine[rank * 4 : rank * 4 + 4].requires_grad_()
    layer, reference = exercise.BatchNorm(1), torch.nn.BatchNorm1d(1, affine=False)
    output, right = layer(part), reference(expected)[rank * 4 : rank * 4 + 4]
    (output * weights[rank * 4 : rank * 4 + 4]).sum().backward()
    (reference(expected) * weights).sum().backward()
    gradients = part.grad.flatten(), expected.grad[rank * 4 : rank * 4 + 4].flatten()
    means = layer.running_mean, whole.mean(0) / 10
    pairs = (output.flatten(), right.flatten()), means, gradients
    return [[x.tolist() for x in pair] for pair in pairs]


def judge_6_5(seen):
    for rank, (outputs, means, gradients) in enumerate(seen):
        right = close(*outputs, 1e-3) and close(*means, 1e-3)
        yield (
            right,
            f"rank {rank}: {short(outputs[0])}; one process: {short(outputs[1])}; "
            f"running mean {means[0][0]:.3f}, one process: {means[1][0]:.3f}",
        )
        if right:
            yield (
                close(*gradients, 1e-3),
                f"rank {rank}: gradients {short(gradients[0])}; one process: {short(gradients[1])}",
            )


# 7.1: timing without synchronising or warm-up


class TimedGpu:
    """Imitates a GPU as the exercise does, and notes when each step really began and ended."""

    def __init__(self, seconds):
        from concurrent.futures import ThreadPoolExecutor

        self.seconds = seconds
        self.queue, self.last, self.times = ThreadPoolExecutor(1), None, []

    def work(self, seconds):
        begin = time.perf_counter()
        time.sleep(seconds)
        self.times.append((begin, time.perf_counter()))

    def step(self):
        self.last = self.queue.submit(self.work, self.seconds + (0 if self.last else 0.4))

    def synchronize(self):
        if self.last:
            self.last.result()


def look_7_1(exercise, rank, world_size):
    gpu = TimedGpu(0.01 + 0.01 * rank)
    measured = exercise.time_step(gpu, 20)
    waited = len(gpu.times)  # steps that were done when the clock was read
    gpu.synchronize()
    if len(gpu.times) < 2:
        return measured, None, len(gpu.times), waited
    real = (gpu.times[-1][1] - gpu.times[1][0]) / (len(gpu.times) - 1)
    return measured, real, len(gpu.times), waited


def judge_7_1(seen):
    for rank, (measured, real, steps, waited) in enumerate(seen):
        yield steps >= 20, f"rank {rank}: steps taken {steps}, asked for 20"
        if not real:
            continue
        text = f"rank {rank}: measured {1000 * measured:.2f} ms, a step takes {1000 * real:.2f} ms"
        if waited < steps:
            text += f": the clock was read when {waited} of {steps} steps were done"
        elif measured > 1.5 * real:
            text += ": the first step, which takes much longer, is in it"
        yield real / 1.5 < measured < real * 1.5, text


# 8.1: the learning rate not scaled


def look_8_1(exercise, rank, world_size):
    import torch

    rates = {}
    for size in (1, 2, world_size):
        model = torch.nn.Linear(1, 1)
        before = flat(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        exercise.make_optimizer(model, size).step()
        rates[size] = sum(x - y for x, y in zip(before, flat(model))) / 2  # as it really is
    return rates, exercise.train(rank, world_size)[0], exercise.train(0, 1)[0]


def judge_8_1(seen):
    for rank, (rates, loss, alone) in enumerate(seen):
        for size in rates:
            yield (
                close([rates[size]], [0.01 * size]),
                f"rank {rank}: learning rate {rates[size]:.3g} with world size {size}; "
                f"the linear rule says {0.01 * size:g}",
            )
        yield loss < 10 * alone, f"rank {rank}: loss {loss:.2g}; one process reaches {alone:.2g}"


# 8.2: warm-up of the learning rate


def look_8_2(exercise, rank, world_size):
    return [exercise.learning_rates(8, 4, size) for size in (1, 4, world_size)]


def judge_8_2(seen):
    for rank, rows in enumerate(seen):
        for size, rates in zip((1, 4, len(seen)), rows):
            expected = [0.01 * (1 + (size - 1) * min(1, step / 4)) for step in range(8)]
            yield (
                close(rates, expected),
                f"rank {rank}: with world size {size} {short(rates)}; right: {short(expected)}",
            )


# 9.1: the rank instead of the local rank


def look_9_1(exercise, rank, world_size):
    devices = []
    for per_node in (2, 1):  # two nodes of two GPUs, then four of one
        numbers = {"RANK": rank, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        exercise.GPUS = per_node
        devices.append(exercise.choose_device())
    return [(device.type, device.index) for device in devices]


def judge_9_1(seen):
    for per_node, place in ((2, 0), (1, 1)):
        there = " and ".join(f"cuda:{number}" for number in range(per_node))
        for rank, devices in enumerate(seen):
            kind, index = devices[place]
            yield (
                (kind, index) == ("cuda", rank % per_node),
                f"rank {rank}: local rank {rank % per_node} on node {rank // per_node}: "
                f"{kind}:{index}; there is {there}, one for each rank of the node",
            )


# 9.2: a sum in two levels


def look_9_2(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    within, between, leader = exercise.make_groups(2)
    groups = []

    def noting(function):
        def call(tensor, *arguments, group=None, **options):
            place = "within" if group is within else "between" if group is between else "all"
            groups.append(place)
            return function(tensor, *arguments, group=group, **options)

        return call

    for name in ("all_reduce", "reduce", "broadcast", "all_gather"):
        setattr(dist, name, noting(getattr(dist, name)))
    value = torch.tensor([1.0 + rank, 10.0 * rank * rank])
    exercise.sum_over_nodes(value, within, between, leader)
    return value.tolist(), groups


def judge_9_2(seen):
    numbers = range(len(seen))
    expected = [sum(1.0 + n for n in numbers), sum(10.0 * n * n for n in numbers)]
    for rank, (value, groups) in enumerate(seen):
        yield (
            close(value, expected),
            f"rank {rank}: {short(value)}; the sum over all ranks is {short(expected)}",
        )
        if close(value, expected):
            used = ", ".join(groups) or "none"
            leads = rank % 2 == 0
            role = "a leader" if leads else "not a leader"
            yield (
                "all" not in groups and ("between" in groups) == leads,
                f"rank {rank}: {role}, collectives in the groups: {used}",
            )


# 10.1: evaluation over padded samples


def look_10_1(exercise, rank, world_size):
    import torch

    looked_at = []

    def model(images):
        looked_at.append(len(images))
        return images

    results = []
    for count in (10, 12, 3):
        images = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
        labels = (torch.arange(count) < 2).long()  # so the first two are wrong
        looked_at.clear()
        results.append((count, exercise.evaluate(model, images, labels, rank, world_size)))
        results[-1] += (sum(looked_at),)
    return results


def judge_10_1(seen):
    for rank, results in enumerate(seen):
        for count, (right, total), looked_at in results:
            yield (
                (right, total) == (count - 2, count) and looked_at <= -(-count // len(seen)),
                f"rank {rank}: {right} of {total} right, where {count - 2} of {count} are; "
                f"it looked at {looked_at}",
            )


# 10.2: metrics of one part reported as those of all


def look_10_2(exercise, rank, world_size):
    import torch

    results, looked_at = [], []

    def model(images):
        looked_at.append(len(images))
        return images

    for labels in ([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0, 1]):
        images = torch.tensor([[1.0, 0.0]]).repeat(len(labels), 1)
        looked_at.clear()
        share = exercise.evaluate(model, images, torch.tensor(labels), rank, world_size)
        results.append((float(share), labels.count(0), len(labels), sum(looked_at)))
    return results


def judge_10_2(seen):
    for rank, results in enumerate(seen):
        for share, right, count, looked_at in results:
            own = abs(share - right / count) < 1e-4
            yield (
                own and looked_at <= -(-count // len(seen)),
                f"rank {rank}: says {share:.1%}, looked at {looked_at}; over all images "
                f"{right} of {count} are right: {right / count:.1%}",
            )


# 11.1: an HDF5 file opened before the workers start


def look_11_1(exercise, rank, world_size):
    import pickle

    import h5py
    from torch.utils.data import DataLoader

    path = shared_folder(rank) / f"rank{rank}.h5"
    exercise.write(path, 32)
    dataset = exercise.Images(path)
    handles = h5py.h5f.get_obj_count(types=h5py.h5f.OBJ_FILE)
    try:
        pickle.loads(pickle.dumps(dataset))
        error = None
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    if handles or error:  # forked workers that share an open file may read anything
        return handles, error, []
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    return handles, error, [int(image.max()) for batch in loader for image in batch]


def judge_11_1(seen):
    for rank, (handles, error, values) in enumerate(seen):
        yield handles == 0, f"rank {rank}: files open before the workers start: {handles}"
        sent = f"cannot be sent to a worker: {error}" if error else "can be sent to a worker"
        yield not error, f"rank {rank}: the data set {sent}"
        if values or not (handles or error):
            right = values == list(range(32))
            yield right, f"rank {rank}: two workers read {short(values)}"


# 11.2: unequal numbers of batches


def look_11_2(exercise, rank, world_size):
    import torch.distributed as dist

    plans = {}
    for chunks in (10, 12):
        parts = [part.tolist() for part in exercise.batches(chunks, rank, world_size)]
        plans[chunks] = parts
    counts = [None] * world_size
    dist.all_gather_object(counts, len(plans[10]))
    alike = len(set(counts)) == 1  # otherwise the training would hang
    return plans, exercise.train(10, rank, world_size) if alike else None


def judge_11_2(seen):
    for chunks in (10, 12):
        counts = [len(plans[chunks]) for plans, _ in seen]
        for rank, count in enumerate(counts):
            fair = chunks // len(seen)
            other = counts.index(min(counts))
            wait = f": it waits in backward for rank {other}, which has {counts[other]}"
            text = f"rank {rank}: {count} batches of {chunks} chunks; all ranks can have {fair}"
            yield count == fair, text + (wait if count > min(counts) else "")
        numbers = [number for plans, _ in seen for batch in plans[chunks] for number in batch]
        twice = len(numbers) - len(set(numbers))
        yield twice == 0, f"all ranks: numbers that came twice from {chunks} chunks: {twice}"
    if seen[0][1] is not None:
        steps = [steps for _, steps in seen]
        yield min(steps) == 10 // len(seen), f"all ranks: steps of training: {short(steps)}"


# 11.3: each chunk to one worker of one rank


def look_11_3(exercise, rank, world_size):
    from torch.utils.data import DataLoader

    results = []
    for count, workers in ((8, 0), (13, 2)):
        loader = DataLoader(
            exercise.Chunks(count, rank, world_size), batch_size=None, num_workers=workers
        )
        results.append((count, workers, list(loader)))
    return results


def judge_11_3(seen):
    for case, (count, workers, _) in enumerate(seen[0]):
        parts = [mine[case][2] for mine in seen]
        for rank, part in enumerate(parts):
            fair = 0 < len(part) <= count // len(seen) + max(1, workers)
            yield (
                fair and len(part) == len(set(part)),
                f"rank {rank}: with {workers} workers it reads {len(part)} of {count} chunks: "
                f"{short(sorted(part))}",
            )
        visits = [chunk for part in parts for chunk in part]
        once = sum(visits.count(chunk) == 1 for chunk in range(count))
        yield (
            once == count == len(visits),
            f"all ranks: {once} of {count} chunks come exactly once, with {workers} workers",
        )


# 12.1: the rest of an epoch after a restart


def look_12_1(exercise, rank, world_size):
    import torch

    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    rests = [exercise.my_rest(order, seen, rank, world_size).tolist() for seen in (0, 16, 39)]
    return order.tolist(), rests


def judge_12_1(seen):
    size = len(seen)
    for at, used in enumerate((0, 16, 39)):
        order, shares = seen[0][0], [rests[at] for _, rests in seen]
        visits = [image for share in shares for image in share]
        left, again = set(order[used:]), len(visits) - len(set(visits) - set(order[:used]))
        whole = len(left) // size * size
        yield (
            len(left & set(visits)) == whole and again == 0,
            f"all ranks: {len(left & set(visits))} of the images left are used, "
            f"{again} images are used again; right after {used} of 40: {whole} and 0",
        )
        for rank, share in enumerate(shares):
            yield (
                len(share) == whole // size,
                f"rank {rank}: {len(share)} images of {len(left)} left",
            )


# 13.1: gradient accumulation


def look_13_1(exercise, rank, world_size):
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    net, x, messages = torch.nn.Linear(2, 1), torch.randn(world_size, 9, 2), []
    alone = torch.nn.Linear(2, 1)
    alone.load_state_dict(net.state_dict())
    alone(x.flatten(0, 1)).square().mean().backward()
    expected = [p - 0.5 * p.grad for p in alone.parameters()]
    model = DistributedDataParallel(net)
    model.register_comm_hook(
        None, lambda _, bucket: messages.append(1) or allreduce_hook(None, bucket)
    )
    group = [(part, torch.zeros(len(part), 1)) for part in x[rank].split(4)]
    exercise.step(model, torch.optim.SGD(net.parameters(), lr=0.5), group)
    return flat(net), torch.cat([p.flatten() for p in expected]).tolist(), len(messages)


def judge_13_1(seen):
    for rank, (mine, right, messages) in enumerate(seen):
        text = f"after batches of 4, 4 and 1 the weights are {short(mine)}; right: {short(right)}"
        yield close(mine, right), f"rank {rank}: {text}"
        yield messages == 1, f"rank {rank}: gradients were averaged {messages} times in a step"


# 13.2: gradients clipped while they are scaled


def look_13_2(exercise, rank, world_size):
    import torch

    moved = []
    for size in (0.5, 8.0):  # the length of the true gradient
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, size / 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        scaler = torch.amp.GradScaler("cpu")
        exercise.step(model, optimizer, scaler, torch.ones(1, 1), torch.zeros(1, 1))
        moved.append(size / 2 - model.weight.item())
    return moved


def judge_13_2(seen):
    for rank, moved in enumerate(seen):
        for size, way, right in zip((0.5, 8.0), moved, (0.5, 1.0)):
            text = f"a gradient of length {size:g} moved the weight by {way:.2g}; right: {right:g}"
            yield close([way], [right]), f"rank {rank}: {text}"


# 14.1: the gradient of a table, row by row


def look_14_1(exercise, rank, world_size):
    import torch

    # One row that all ranks have used, and one that only this rank has used, twice.
    rows, values = torch.tensor([0, 1 + rank, 1 + rank]), torch.arange(6.0).view(3, 2) + 10 * rank
    result = exercise.average_rows(rows.clone(), values.clone())
    return [x.tolist() for x in (rows, values, *result)]


def judge_14_1(seen):
    def total(row, parts):  # the sum of what the parts have for a row
        found = [v for rows, values in parts for r, v in zip(rows, values) if r == row]
        return [sum(column) for column in zip(*found)]

    count = sum(len(rows) for rows, _, _, _ in seen)
    for rank, (_, _, rows, values) in enumerate(seen):
        yield len(rows) == count, f"rank {rank}: has the gradients of {len(rows)} of {count} rows"
        for row in range(len(seen) + 1):
            right = [x / len(seen) for x in total(row, [mine[:2] for mine in seen])]
            mine = total(row, [(rows, values)])
            text = f"rank {rank}: row {row}: {short(mine) or 'nothing'}; right: {short(right)}"
            yield close(mine, right), text


# 14.2: a map that stays


def look_14_2(exercise, rank, world_size):
    path = shared_folder(rank) / f"rank{rank}"
    exercise.write(path)
    ratings, before = exercise.Ratings(path), exercise.peak_memory()
    mean = exercise.mean(ratings)
    path.unlink()
    return mean, exercise.peak_memory() - before


def judge_14_2(seen):
    for rank, (mean, grown) in enumerate(seen):
        yield mean == 2.5, f"rank {rank}: mean {mean:g}; right: 2.5"
        text = f"rank {rank}: its memory grew by {grown:.0f} MB while it read 48 MB in parts of 4"
        yield grown < 16, text


# 15.1: every world_size-th batch


def look_15_1(exercise, rank, world_size):
    return [
        [int(batch) for batch in exercise.my_batches(list(range(count)), rank, world_size)]
        for count in (8, 9)
    ]


def judge_15_1(seen):
    size = len(seen)
    for rank, rows in enumerate(seen):
        for count, mine in zip((8, 9), rows):
            right = [n * size + rank for n in range(count // size)]
            yield mine == right, f"rank {rank}: batches {short(mine)}; right: {short(right)}"


# 16.1: error feedback


def look_16_1(exercise, rank, world_size):
    import torch

    gradient, rest = torch.tensor([8.0, -4.0, 2.0]), torch.zeros(3)
    sent = [exercise.largest(gradient.clone(), rest).tolist() for _ in range(6)]
    return sent, rest.tolist(), exercise.train(300, rank)


def judge_16_1(seen):
    right = [48.0, -24.0, 12.0]
    for rank, (sent, rest, gap) in enumerate(seen):
        most = max(sum(x != 0 for x in step) for step in sent)
        yield most == 1, f"rank {rank}: sends at most {most} numbers in a step"
        total = [sum(column) for column in zip(*sent, rest)]
        text = f"sent and kept in 6 steps: {short(total)}; its gradients: {short(right)}"
        yield close(total, right), f"rank {rank}: {text}"
        yield gap < 0.3, f"rank {rank}: ends {gap:.2f} from the best numbers"


# 16.2: forward outside of no_sync


def look_16_2(exercise, rank, world_size):
    import torch

    mine, messages = exercise.train(rank, world_size, 4)
    torch.manual_seed(0)
    model, points = torch.nn.Linear(1, 1), torch.linspace(-2, 2, 64 * world_size)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in points.split(16 * world_size):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), 3 * x - 1).backward()
        optimizer.step()
    return mine, flat(model), messages


def judge_16_2(seen):
    for rank, (mine, right, messages) in enumerate(seen):
        yield close(mine, right), f"rank {rank}: parameters {short(mine)}; right: {short(right)}"
        yield messages == 4, f"rank {rank}: {messages} messages for 4 steps of the optimizer"


# 17.1: an optimizer made before sharding


def look_17_1(exercise, rank, world_size):
    model, optimizer, losses = exercise.train(50)
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    fits = [id(parameter) in own for parameter in model.parameters()]
    parts = [parameter.to_local().numel() for parameter in model.parameters()]
    return sum(fits), len(fits), sum(parts), losses[0], losses[-1]


def judge_17_1(seen):
    for rank, (fits, count, numbers, first, last) in enumerate(seen):
        yield fits == count, f"rank {rank}: {fits} of {count} parameters are known to the optimizer"
        yield numbers < 193, f"rank {rank}: keeps {numbers} of the model's 193 numbers"
        yield last < first / 4, f"rank {rank}: loss {first:.2g} at first, {last:.2g} at last"


# 17.2: activation checkpointing


def look_17_2(exercise, rank, world_size):
    import torch

    torch.manual_seed(0)
    model, x = exercise.Net(), torch.randn(256, 32)
    numbers = exercise.kept(model, x)
    mine = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.nn.Sequential(*model.layers)(x).square().mean().backward()
    right = [parameter.grad for parameter in model.parameters()]
    return numbers, all(a is not None and torch.allclose(a, b) for a, b in zip(mine, right))


def judge_17_2(seen):
    for rank, (numbers, right) in enumerate(seen):
        into = 8 * 256 * 32  # what goes into the layers
        text = f"{numbers:,} numbers are kept for backward; {into:,} go into the layers"
        yield numbers == into, f"rank {rank}: {text}"
        yield right, f"rank {rank}: the gradients are {'the right ones' if right else 'others'}"


# Running an exercise: the side of the ranks.


def load(file):
    """Return the exercise as a module. It is called as multiprocessing calls a main module."""
    spec = importlib.util.spec_from_file_location("__mp_main__", file)
    module = importlib.util.module_from_spec(spec)
    # Then processes that it starts, for example those of a DataLoader, find its classes too.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    module.__spec__ = None
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return module


def function_of(prefix, exercise_id):
    """Return look_4_1 or judge_4_1 for exercise 4.1."""
    return globals()[f"{prefix}_{exercise_id.replace('.', '_')}"]


def sentence_of(error, file):
    """Return an exception as one line, with the line of the exercise in which it happened."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == file]
    place = frames[-1].lineno if frames else getattr(error, "lineno", None)
    words = str(error).strip()
    if "Traceback" in words:  # from a process that the rank had started: its last line says it
        words = words.splitlines()[-1]
    words = re.sub(r"^\[/[^]]*\] ", "", " ".join(words.split()))  # gloo begins with a path
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return (f"line {place}: " if place else "") + text[:300]


def attempt(function, *arguments):
    """Call a function. Return its result and None, or None and what went wrong."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, sentence_of(error, function.__code__.co_filename)


def be_rank(rank, world_size, exercise_id, file, folder, pipe):
    """Be one rank: join the group, load the exercise, look, tell, and wait until all are done."""
    launcher = multiprocessing.parent_process()  # end with it, however it ends
    threading.Thread(target=lambda: launcher.join() or os._exit(1), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(folder)
    output = os.open(f"output of rank {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if sys.platform == "linux":  # the workers of a DataLoader: quick, and as in lesson 11
            multiprocessing.set_start_method("fork", force=True)
        store = dist.FileStore("store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()
        pipe.send(("started", None))
        pipe.send(("seen", function_of("look", exercise_id)(load(file), rank, world_size)))
    except SystemExit as error:
        pipe.send(("failed", f"ended itself by exit({error.code!r})"))
    except BaseException as error:
        pipe.send(("failed", sentence_of(error, file)))
    with contextlib.suppress(EOFError):
        pipe.recv()  # who leaves early breaks the connections of the others
    os._exit(0)


# Running an exercise: the side of this process, which needs no torch.


def start_ranks(exercise, file, folder):
    """Start the ranks. Return {pipe: rank} and the processes."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = {}, []
    for rank in range(exercise["processes"]):
        ours, theirs = context.Pipe()
        arguments = (rank, exercise["processes"], exercise["id"], str(file), folder, theirs)
        processes.append(context.Process(target=be_rank, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes[ours] = rank
    return pipes, processes


def collect(pipes):
    """Return what each rank saw, in rank order. Raise Ended if one fails or does not end."""
    seen, failed, started = {}, {}, set()
    end, patience = time.monotonic() + START_LIMIT, f"{RUN_LIMIT} s"
    while len(seen) + len(failed) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in seen | failed]
        ready = wait(waiting, max(0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                kind, value = "failed", "the process ended without a word"
            if kind == "started":
                started.add(rank)
                if len(started) == len(pipes):
                    end = time.monotonic() + RUN_LIMIT
            elif kind == "seen":
                seen[rank] = value
            else:
                if not failed:  # the others may have something to say, or wait in vain for this one
                    end = min(end, time.monotonic() + 1)
                failed[rank] = value
    if len(seen) == len(pipes):
        return [seen[rank] for rank in sorted(seen)]
    # "Connection closed by peer" is what a rank says when another has failed: not the cause.
    causes = {rank: text for rank, text in failed.items() if "by peer" not in text} or failed
    if causes:
        raise Ended(*(f"rank {rank}: {text}" for rank, text in sorted(causes.items())))
    late = ", ".join(str(rank) for rank in pipes.values() if rank not in seen)
    text = f"rank {late}: not finished after {patience}. A collective that not all ranks call?"
    raise Ended(text)


def run(exercise, file):
    """Run an exercise. Return whether it passed, and the lines (right, sentence)."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes, processes = start_ranks(exercise, file, folder)
        try:
            seen = collect(pipes)
            lines = list(function_of("judge", exercise["id"])(seen))
            if not all(right for right, _ in lines):
                lines.append((None, exercise["consequence"]))
        except Ended as error:
            lines = [(False, text) for text in error.args]
        except Exception as error:  # what the ranks returned is of another kind than expected
            text = f"the result cannot be read ({type(error).__name__}: {error})"
            lines = [(False, f"all ranks: {text}. Return what the docstring says.")]
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:  # they are done, or will never be
                process.kill()
            for process in processes:
                process.join()
    return all(right for right, _ in lines), lines


# The record of what has passed, and the command.


def digest(file):
    """Return a short text that changes when the file does; None if there is no file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else None


def read_record():
    """Return {id: {state, digest, hints}} of the earlier checks."""
    try:
        return json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return {}


def write_record(record):
    """Keep the record, unless the folder cannot be written."""
    with contextlib.suppress(OSError):
        RECORD.parent.mkdir(exist_ok=True)
        temporary = RECORD.with_name(f".{RECORD.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, RECORD)


def list_exercises(exercises, record):
    """Print all exercises. An exercise changed since it was checked counts as not checked."""
    for exercise in exercises.values():
        known = record.get(exercise["id"], {})
        same = known.get("digest") == digest(ROOT / exercise["file"])
        state = known.get("state", "-") if same else "-"
        print(f"{exercise['id']:>5}  {state:8}  {exercise['kind']:15} {exercise['file']}")
    print("Check one: python scripts/check.py 4.1      A hint: python scripts/check.py 4.1 --hint")


def file_of(exercise, solution):
    """Return the path of an exercise, or of its solution."""
    file = ROOT / exercise["file"]
    return file.parent / "solutions" / file.name if solution else file


def check(exercise, record, solution):
    """Check one exercise, print its lines, keep the state. Return whether it passed."""
    file = file_of(exercise, solution)
    title = f"{exercise['id']}  {file.relative_to(ROOT)}"
    print(f"{title}, ranks: {exercise['processes']}" + (", the solution" if solution else ""))
    if file.exists():
        passed, lines = run(exercise, file)
    else:
        passed, lines = False, [(False, f"the file is missing: git checkout {title.split()[1]}")]
    for right, sentence in lines:
        print(f"  {MARKS[right]}  {sentence}")
    state = "passed" if passed else "not yet"
    print(state, flush=True)
    if not solution:
        known = record.setdefault(exercise["id"], {})
        known.update(state=state, digest=digest(file))
    return passed


def give_hints(exercise, record, count):
    """Print as many hints as asked for, and one more than the last time."""
    known = record.setdefault(exercise["id"], {})
    known["hints"] = min(len(exercise["hints"]), max(count, known.get("hints", 0) + 1))
    for number, hint in enumerate(exercise["hints"][: known["hints"]], 1):
        print(f"hint {number}: {hint}")


def parse_args(exercises):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("id", nargs="*", help="such as 4.1, or all; without it: list them")
    parser.add_argument("--hint", action="count", default=0, help="a hint; again: a second one")
    parser.add_argument("--solution", action="store_true", help="check the solution instead")
    args = parser.parse_args()
    for name in args.id:
        if name != "all" and name not in exercises:
            parser.exit(2, f"There is no exercise {name}. python scripts/check.py lists them.\n")
    if "all" in args.id:
        args.id = list(exercises)
    return args


def main():
    """Do what the command line asks for; return the exit status."""
    manifest = tomllib.loads((ROOT / "scripts" / "exercises.toml").read_text())
    exercises = {exercise["id"]: exercise for exercise in manifest["exercise"]}
    args, record = parse_args(exercises), read_record()
    if not args.id:
        list_exercises(exercises, record)
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("This Python has no torch. First: source .venv/bin/activate")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # the ranks end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["KINETO_LOG_LEVEL"] = "99"  # hides what the profiler says of itself
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        modules = ["torch", "torch._dynamo", "torch.distributed", "torch.profiler", "h5py"]
        multiprocessing.set_forkserver_preload(modules)
    passed = 0
    for name in args.id:
        passed += check(exercises[name], record, args.solution)
        if args.hint:
            give_hints(exercises[name], record, args.hint)
        write_record(record)
    if len(args.id) > 1:
        print(f"{passed} of {len(args.id)} passed")
    return 0 if passed == len(args.id) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # who reads the output, for example head, has gone
        os._exit(1)
