"""What several checks share: how they call the exercise, compare and show numbers, and report.

check.py itself needs no PyTorch, which takes seconds to import, so the functions here import it.
"""

import math
import re
import tempfile
import time
import traceback
from pathlib import Path


class Report:
    """The lines of a check: a list of (right, sentence). All methods return right."""

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

    def numbers(self, what, mine, right, limit=1e-4):
        """Add a line about numbers that must be within limit of the right ones."""
        words = f"{what} {short(mine)}; right: {short(right)}".lstrip()
        if len(mine) != len(right):
            return self(False, f"{words}; numbers: {len(mine)}, right: {len(right)}")
        far = gap(mine, right)
        return self(far <= limit, f"{words}; off by {far:.3g} (limit {limit:g})")

    def no_error(self, what, error):
        """Add a line about something that must end without an error, which is then None."""
        return self(not error, f"{what} {error or 'no error'} (right: no error)")


# How the exercise is called.


def counting_model():
    """Return a model that returns its images, and the list in which it notes their numbers."""
    looked_at = []

    def model(images):
        looked_at.append(len(images))
        return images

    return model, looked_at


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
        return None, sentence_of(error, function.__code__.co_filename)


def noted(owner, name, seconds=0):
    """Have a function wait first and note its calls. Return the list of their arguments."""
    function, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(arguments)
        time.sleep(seconds)
        return function(*arguments, **options)

    setattr(owner, name, call)
    return calls


def train_alone(model, optimizer, batches, loss_of=None, clip=None):
    """Train as one process does, a step for each (x, y). Return the losses."""
    import torch

    loss_of = loss_of or torch.nn.functional.mse_loss
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


def flat(model):
    """Return all parameters of a model as one list of numbers."""
    return [x for parameter in model.parameters() for x in parameter.detach().flatten().tolist()]


# What stands in the lines.


def gap(a, b):
    """Return the largest difference between two lists of numbers; nan if one of them is nan."""
    gaps = [abs(x - y) for x, y in zip(a, b)]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def short(values):
    """Return a list of numbers as a short text."""
    text = ", ".join(f"{value:.4g}" for value in values[:6]) or "nothing"
    return f"{text}, ..." if len(values) > 6 else text


def names(numbers):
    """Return "rank 0" or "rank 0, 2" for some ranks."""
    return "rank " + ", ".join(map(str, numbers))
