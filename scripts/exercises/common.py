"""What several checks share: facts and how they are judged, and how an exercise is looked at."""

import math
import re
import sys
import traceback
from functools import cache, wraps
from time import sleep  # a check may replace that of exercises
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exercises.runner import Finding

SHOWN = 6  # of the values of a list, at most


class Fact(NamedTuple):
    """What a check has seen on this rank.

    Without right, least and most, it must be what the solution shows in the same place. Numbers may
    be a little off: close says how much, as a share of the largest one.
    """

    what: str
    value: Any  # a number, a text, a list, a tensor, a model, or several such
    key: str = ""  # of the hints about it
    right: Any = None
    least: float = -math.inf
    most: float = math.inf
    close: float = 1e-3


def judge(fact, right):
    """Compare a fact with the same one of the solution. Return a Finding, not yet of a rank."""
    value = plain(fact.value)
    right = plain(fact.right if fact.right is not None else right.value)
    limits = [f"{x:.4g}" for x in (fact.least, fact.most) if math.isfinite(x)]
    if limits:
        word = "limit" if math.isfinite(fact.most) else "limit: at least"
        allowed = f"{word if len(limits) == 1 else 'limits'} {' and '.join(limits)}"
        ok = fact.least <= value <= fact.most
        return Finding(ok, fact.what, f"{value:.4g}", allowed, fact.key)
    values, rights = [x if isinstance(x, list) else [x] for x in (value, right)]
    kinds = {type(x) for x in values + rights}
    if kinds not in ({float}, {int, float}) or len(values) != len(rights):
        return Finding(value == right, fact.what, short(value), f"right: {short(right)}", fact.key)
    far, limit = gap(values, rights), fact.close * max(map(abs, rights))
    off = [i for i, (x, y) in enumerate(zip(values, rights)) if not abs(x - y) <= limit]
    start = off[0] if off and off[0] >= SHOWN else 0  # what is off, not what is equal
    where = f"[{start}:] " if start else ""
    seen = f"{where}{short(values[start:])}, off by {far:.3g}"
    allowed = f"right: {short(rights[start:])}, limit {limit:.3g}"
    return Finding(far <= limit, fact.what, seen, allowed, fact.key)


def plain(value):
    """Return a value that later steps don't change: a number, a text, or a flat list of them."""
    return value if isinstance(value, str | int | float | None) else flat(value)


def gather(value):
    """Return the values of all ranks, in rank order. The exercise's messages can't disturb it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=own_group())
    return values


@cache
def own_group():
    """Return a group of all ranks that only the check uses."""
    return dist.new_group()


def once(parts, count):
    """Return how many of the numbers from 0 to count - 1 are in the parts exactly once."""
    numbers = [number for part in parts for number in part]
    return sum(numbers.count(number) == 1 for number in range(count))


class Messages(TorchDispatchMode):
    """In a with statement: note what this rank sends, for the exercise or a library.

    calls: {name: number of calls}. bytes: what goes out if collectives go around in a ring.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = {}, 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        name = operation.__name__.partition(".")[0].strip("_")
        if "c10d" in operation.namespace and not re.match("recv|wait|wrap|barrier", name):
            self.calls[name] = self.calls.get(name, 0) + 1
            tensors = [[x for x in tree_leaves(y) if torch.is_tensor(x)] for y in arguments]
            tensors.append([x for x in tree_leaves(result) if torch.is_tensor(x)])
            largest = max(sum(x.nbytes for x in part) for part in tensors)
            ranks = dist.get_world_size()
            times = 1 if re.match("send|broadcast", name) else 1 - 1 / ranks
            self.bytes += largest * times * (2 if re.match("all_?reduce", name) else 1)
        return result


def sentence_of(error, file):
    """Return an exception as one line, with the line of the exercise in which it happened."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == file]
    place = frames[-1].lineno if frames else getattr(error, "lineno", None)
    words = str(error).strip()
    if "Traceback" in words:  # from a process that the rank started: its last line is the error
        words = words.splitlines()[-1]
    words = re.sub(r"^\[/[^]]*\] ", "", " ".join(words.split()))  # gloo begins with a path
    text = f"{type(error).__name__}: {words}"[:300]
    if isinstance(error, AttributeError) and error.obj is sys.modules["__main__"]:
        return f"the file has no {error.name} any more, which the check needs"
    return f"line {place}: {text}" if place else text


def attempt(function, *arguments, **options):
    """Call a function. Return its result and None, or None and what went wrong."""
    try:
        return function(*arguments, **options), None
    except Exception as error:
        return None, sentence_of(error, sys.modules["__main__"].__file__)


def noted(owner, name, seconds=0):
    """Have a function wait first and note its calls: a list of (arguments, options)."""
    function, calls = getattr(owner, name), []

    @wraps(function)  # of the same signature
    def call(*arguments, **options):
        calls.append((arguments, options))
        sleep(seconds)
        return function(*arguments, **options)

    setattr(owner, name, call)
    return calls


def at_each_step(look):
    """Have look(optimizer) called before each step of any. Return the list of what it returns."""
    seen = []
    register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(look(optimizer)))
    return seen


def flat(values):
    """Return as one list: a number, a text, a tensor, a model's parameters, or several such.

    Of a DTensor it takes the part that this rank holds.
    """
    if hasattr(values, "parameters"):
        values = list(values.parameters())
    if isinstance(values, list | tuple):
        return [x for value in values for x in flat(value)]
    if hasattr(values, "to_local"):
        values = values.to_local()
    return values.flatten().tolist() if hasattr(values, "flatten") else [values]


def indices(calls):
    """Return the indices of noted calls of __getitem__, which may be numbers or lists of them."""
    return [x for (_, index), _ in calls for x in torch.as_tensor(index).flatten().tolist()]


def gradients(model):
    """Return all gradients that a model has as one list of numbers."""
    return flat([x.grad for x in model.parameters() if x.grad is not None])


def kept_for_backward(model, x):
    """Return model(x), and how many bytes are kept for its backward, besides parameters.

    By autograd, and in attributes: of Functions, of modules, of the exercise and its classes.
    """
    storages = {}

    def keep(tensor):
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [x for x, _ in node.next_functions if x is not None and x not in nodes]
    exercise = vars(sys.modules["__main__"])
    owners = [*nodes, *model.modules(), *(x for x in exercise.values() if isinstance(x, type))]
    for value in tree_leaves([exercise, *(dict(getattr(x, "__dict__", {})) for x in owners)]):
        if torch.is_tensor(value):
            keep(value)
    return y, sum(storages.values())


def gap(a, b):
    """Return the largest difference of two, as flat takes them; nan if a number is nan."""
    gaps = [abs(x - y) for x, y in zip(flat(a), flat(b))]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def short(value):
    """Return a value, or the first of several, as a short text."""
    if not isinstance(value, list):
        return "none" if value is None else str(value)
    words = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in value[:SHOWN]]
    return ", ".join([*words, "..."] if len(value) > SHOWN else words) or "nothing"
