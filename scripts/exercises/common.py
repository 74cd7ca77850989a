"""What several checks share: how they call the exercise, compare and show numbers, and report.

check.py itself needs no PyTorch, which takes seconds to import, so the functions here import it.
"""

import math
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path


class Report:
    """The lines of a check: a list of (right, sentence). Methods for one line return right."""

    def __init__(self, who=""):
        self.who = who  # begins each sentence
        self.lines = []

    def __call__(self, right, sentence):
        """Add a line."""
        self.lines.append((bool(right), self.who + sentence))
        return bool(right)

    def equal(self, what, value, right):
        """Add a line about a value that must be the right one."""
        return self(value == right, f"{what} {value} (right: {right})")

    def at_most(self, what, value, limit):
        """Add a line about a number that may be as large as the limit."""
        return self(value <= limit, f"{what} {value:.3g} (limit {limit:g})")

    def numbers(self, what, mine, right, limit=1e-4):
        """Add a line about numbers, as flat takes them, that must be within limit of the right."""
        mine, right = flat(mine), flat(right)
        words = f"{what} {short(mine)}; right: {short(right)}".lstrip()
        if len(mine) != len(right):
            return self(False, f"{words}; numbers: {len(mine)}, right: {len(right)}")
        far = gap(mine, right)
        return self(far <= limit, f"{words}; off by {far:.3g} (limit {limit:g})")

    def no_error(self, what, error):
        """Add a line about something that must end without an error, which is then None."""
        return self(not error, f"{what} {error or 'no error'} (right: no error)")

    def learned(self, losses, share=1.0):
        """Add a line about losses: the last one must be less than this share of the first."""
        first, last, limit = (float(x) for x in (losses[0], losses[-1], share * losses[0]))
        text = f"loss {first:.4g} in step 0, {last:.4g} in step {len(losses) - 1}"
        return self(last < limit, f"{text} (limit {limit:.4g})")

    def like_one_process(self, model, alone, limit=1e-4):
        """Add a line about the parameters of a model, and of the one that one process trains."""
        far = gap(model, alone)
        return self(far <= limit, f"parameters within {far:.1g} of one process's (limit {limit:g})")

    def same_on_all_ranks(self, parameters, limit):
        """Add a line for each other rank: how far its parameters, a list, are from rank 0's."""
        for rank, own in enumerate(parameters[1:], start=1):
            what = f"rank {rank}: its parameters differ from rank 0's by up to"
            self.at_most(what, gap(own, parameters[0]), limit)

    def new_order(self, first, second):
        """Add a line about what one rank gets in two epochs."""
        text = f"epoch 0 begins with {short(first, 4)}, epoch 1 with {short(second, 4)}"
        return self(first != second, f"{text} (right: a new order)")

    def each_once(self, what, used, count):
        """Add a line for each epoch about what all ranks used: each of 0 to count - 1 once.

        used: for each rank a list of epochs, which are lists of numbers.
        """
        for epoch, parts in enumerate(zip(*used)):
            numbers = [number for part in parts for number in part]
            once = sum(numbers.count(number) == 1 for number in range(count))
            self.equal(f"all ranks: {what} seen exactly once in epoch {epoch}:", once, count)


# How the exercise is called.


def sentence_of(error, file):
    """Return an exception as one line, with the line of the exercise in which it happened."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == file]
    place = frames[-1].lineno if frames else getattr(error, "lineno", None)
    words = str(error).strip()
    if "Traceback" in words:  # from a process that the rank started: its last line is the error
        words = words.splitlines()[-1]
    words = re.sub(r"^\[/[^]]*\] ", "", " ".join(words.split()))  # gloo begins with a path
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return (f"line {place}: " if place else "") + text[:300]


def attempt(function, *arguments, **options):
    """Call a function. Return its result and None, or None and what went wrong."""
    try:
        return function(*arguments, **options), None
    except Exception as error:
        return None, sentence_of(error, sys.modules["__main__"].__file__)


def noted(owner, name, seconds=0):
    """Have a function wait first and note its calls: a list of (arguments, options)."""
    function, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append((arguments, options))
        time.sleep(seconds)
        return function(*arguments, **options)

    setattr(owner, name, call)
    return calls


class SlowQueue:
    """Does what it's asked for later, one after the other, as a GPU and a network do."""

    def __init__(self):
        self.ends = [0.0]

    def add(self, seconds):
        """Ask for work that takes so long."""
        self.ends.append(max(time.perf_counter(), self.ends[-1]) + seconds)

    def wait(self, *_):
        """Wait until all work is done."""
        time.sleep(max(0, self.ends[-1] - time.perf_counter()))


def train_alone(model, batches, loss_of=None, clip=None, optimizer=None, **options):
    """Train as one process does, a step for each (x, y), by SGD unless told. Return the losses."""
    import torch

    loss_of = loss_of or torch.nn.functional.mse_loss
    optimizer = (optimizer or torch.optim.SGD)(model.parameters(), **options)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def shared_folder(rank):
    """Return a folder that is new and the same for all ranks."""
    import torch.distributed as dist

    folder = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def flat(values):
    """Return as one list of numbers: a number, a tensor, a model's parameters, or several such."""
    if hasattr(values, "parameters"):
        values = list(values.parameters())
    if isinstance(values, list | tuple):
        return [x for value in values for x in flat(value)]
    return values.flatten().tolist() if hasattr(values, "flatten") else [float(values)]


def gradients(model):
    """Return all gradients that a model has as one list of numbers."""
    return flat([x.grad for x in model.parameters() if x.grad is not None])


# What stands in the lines.


def gap(a, b):
    """Return the largest difference of two, as flat takes them; nan if a number is nan."""
    gaps = [abs(x - y) for x, y in zip(flat(a), flat(b))]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def short(values, most=6):
    """Return a list of numbers as a short text."""
    text = ", ".join(f"{value:.4g}" for value in values[:most]) or "nothing"
    return f"{text}, ..." if len(values) > most else text
