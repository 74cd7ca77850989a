"""What several checks share: how they call the exercise, and how they compare and show numbers."""

import math
import re
import tempfile
import traceback
from pathlib import Path

# On the ranks.


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


def shared_folder(rank):
    """Return a folder that is new and the same for all ranks."""
    import torch.distributed as dist

    folder = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def flat(model):
    """Return all parameters of a model as one list of numbers."""
    return [x for parameter in model.parameters() for x in parameter.detach().flatten().tolist()]


# For the lines.


def gap(a, b):
    """Return the largest difference between two lists of numbers; nan if one of them is nan."""
    gaps = [abs(x - y) for x, y in zip(a, b)]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def compared(mine, right, limit=1e-4):
    """Return whether numbers are within limit of the right ones, and the words to print."""
    words = f"{short(mine)}; right: {short(right)}"
    if len(mine) != len(right):
        return False, f"{words}; numbers: {len(mine)}, right: {len(right)}"
    far = gap(mine, right)
    return far <= limit, f"{words}; off by {far:.3g} (limit {limit:g})"


def short(values):
    """Return a list of numbers as a short text."""
    text = ", ".join(f"{value:.4g}" for value in values[:6]) or "nothing"
    return f"{text}, ..." if len(values) > 6 else text


def ranks(seen, test):
    """Return the ranks for which test(what the rank saw) is true, as a list."""
    return [rank for rank, mine in enumerate(seen) if test(mine)]


def names(numbers):
    """Return "rank 0" or "rank 0, 2" for some ranks."""
    return "rank " + ", ".join(map(str, numbers))
