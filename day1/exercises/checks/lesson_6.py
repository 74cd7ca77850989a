from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import Fact, attempt, flat, gather, noted
from torch.nn.parallel import DistributedDataParallel

PATH = Path("checkpoint.pt")


def check_6_1(exercise, rank, world_size):
    backward, all_reduce = torch.Tensor.backward, dist.all_reduce
    flying, most, during, ready = [], [], [], []
    models = noted(exercise, "watch")

    class Message:
        def __init__(self, work):
            self.work = work
            flying.append(self)

        def wait(self):
            if self in flying:
                flying.remove(self)
            return self.work.wait()

    def watched(tensor, *arguments, async_op=False, **options):
        message = Message(all_reduce(tensor, *arguments, async_op=True, **options))
        most.append(len(flying))
        (model,), _ = models[-1]
        ready.append(sum(x.grad is not None for x in model.parameters()))
        return message if async_op else message.wait()

    def noting(loss, *arguments, **options):
        before = len(most)
        backward(loss, *arguments, **options)
        during.append(len(most) - before)

    torch.Tensor.backward, dist.all_reduce = noting, watched
    model, counts = exercise.train(5)
    torch.Tensor.backward, dist.all_reduce = backward, all_reduce
    yield Fact("parameters", model, "finish")
    yield Fact("messages that backward starts, in each step:", during, "begin")
    what = "gradients, of 8, that are there when the first message starts:"
    yield Fact(what, min(ready), "begin", most=4)
    yield Fact("messages in flight as train counts them:", counts, "finish")
    yield Fact("messages in flight at a time, at most:", max(most), "begin")
    yield Fact("messages that nobody has waited for:", len(flying), "begin", most=0)


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
