import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import Fact, Messages, attempt, flat, gather, noted
from torch.nn.parallel import DistributedDataParallel

PATH = Path("checkpoint.pt")


def check_6_1(exercise, rank, world_size):
    backward, all_reduce = torch.Tensor.backward, dist.all_reduce
    models = noted(exercise, "watch")
    flying, started, during, ready, ended = [], [], [], [], []
    others = world_size - 1

    class Message:
        def __init__(self, work):
            self.work = work
            flying.append(self)

        def __getattr__(self, name):  # wait, or is_completed, or get_future
            if self in flying:
                flying.remove(self)
            return getattr(self.work, name)

    class Noting(Messages):
        def __torch_dispatch__(self, operation, *arguments):
            if "c10d" in operation.namespace and "wait" not in operation.__name__:
                started.append(operation)
                (model,), _ = models[-1]
                ready.append(sum(x.grad is not None for x in model.parameters()))
            return super().__torch_dispatch__(operation, *arguments)

    def watched(*arguments, **options):
        work = all_reduce(*arguments, **options)
        return work and Message(work)

    def noting(loss, *arguments, **options):
        before, step = len(started), len(during)
        if rank == 0 and min(ended, default=others) == others:  # it is late
            ended.append(wait_for(others, f"ended {step} *"))
        backward(loss, *arguments, **options)
        during.append(len(started) - before)
        Path(f"ended {step} {rank}").touch()

    torch.Tensor.backward, dist.all_reduce = noting, watched
    with Noting() as messages:
        model, counts = exercise.train(5)
    torch.Tensor.backward, dist.all_reduce = backward, all_reduce
    numbers = sum(x.numel() for x in model.parameters())
    yield Fact("parameters", model, "finish", close=1e-5)
    yield Fact("messages that backward starts, in each step:", during, "begin")
    what = "gradients, of 8, that are there when the first message starts:"
    yield Fact(what, min(ready, default=8), "begin", most=4)
    yield Fact("messages in flight as train counts them:", counts, "finish")
    what = "other ranks whose backward ends before that of rank 0 begins:"
    yield Fact(what, min(gather(min(ended, default=others))), "begin", right=others)
    yield Fact("messages that nobody has waited for:", len(flying), "begin", most=0)
    yield Fact("messages in 5 steps, also barriers:", len(started), "finish", most=40)
    most = 5 * numbers * 4 * 2 * (1 - 1 / world_size)
    yield Fact("bytes sent in 5 steps:", messages.bytes, "finish", most=most)
    world = dist.distributed_c10d._world
    whole, world.default_pg = world.default_pg, dist.new_subgroups(2)[0]
    model, _ = exercise.train(1)
    world.default_pg = whole
    yield Fact("parameters, if two ranks train,", model, "finish", close=1e-5)


def wait_for(count, pattern):
    """Wait at most 5 seconds until there are count files. Return how many there are."""
    end = time.monotonic() + 5
    while len([*Path().glob(pattern)]) < count and time.monotonic() < end:
        time.sleep(0.01)
    return len([*Path().glob(pattern)])


def check_6_2(exercise, rank, world_size):
    # A large model on a slow disk, and never at the same moment.
    calls = noted(torch, "save", 0.3 + 0.2 * rank)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    with mock.patch("time.sleep"):  # takes no time: too short to wait for others
        exercise.save(model, PATH)
    state, error = attempt(torch.load, PATH, weights_only=True)
    yield Fact("reading the file ended with error:", error, "wait")
    writers = {*gather(None if error else int(state["weight"]))} - {None}
    yield Fact("number of ranks whose weights are read:", len(writers), "one")
    yield Fact("times that the file was written:", sum(gather(len(calls))), "one")


def check_6_4(exercise, rank, world_size):
    """All but save() and load() is the check's own, so these must be complete."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.95)
    again = DistributedDataParallel(torch.nn.Linear(1, 1))
    resumed = torch.optim.SGD(again.parameters(), lr=0.03, momentum=0.95)
    batches = torch.randn(10, 8, 1)
    train(model, optimizer, batches[:5])
    exercise.save(PATH, model, optimizer)
    dist.barrier()
    exercise.load(PATH, again, resumed)
    yield Fact(
        "with this check's model, after loading, weights", again, right=flat(model)
    )
    train(model, optimizer, batches[5:])
    train(again, resumed, batches[5:])
    yield Fact(
        "with this check's model, 5 steps after loading, weights",
        again,
        right=flat(model),
    )
    losses = exercise.train(*exercise.begin(), 10)
    yield Fact("loss", losses[-1], most=losses[0])


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
