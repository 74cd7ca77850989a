from pathlib import Path

import torch
import torch.distributed as dist
from exercises.common import Fact, attempt, flat, gather, noted
from torch.nn.parallel import DistributedDataParallel

PATH = Path("checkpoint.pt")


def check_6_2(exercise, rank, world_size):
    # A large model on a slow disk, and never at the same moment.
    calls = noted(torch, "save", 0.3 + 0.2 * rank)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    exercise.save(model, PATH)
    state, error = attempt(torch.load, PATH, weights_only=True)
    yield Fact("reading the file ended with error:", error, "wait")
    writers = {*gather(None if error else int(state["weight"]))} - {None}
    yield Fact("number of ranks whose weights are read:", len(writers), "one")
    yield Fact("times that the file was written:", sum(gather(len(calls))), "one")


def check_6_3(exercise, rank, world_size):
    model = DistributedDataParallel(exercise.make_model())
    exercise.save(model, PATH)
    loaded, error = attempt(exercise.load, PATH)
    yield Fact("loading the checkpoint ended with error:", error, "load")
    same = 0 if error else sum(x == y for x, y in zip(flat(model), flat(loaded)))
    yield Fact("numbers that are the trained ones after loading:", same, "load")
    other = Path(f"wrong{rank}.pt")
    torch.save({"another.weight": torch.zeros(1)}, other)
    _, error = attempt(exercise.load, other)
    yield Fact("refuses the checkpoint of a different model:", bool(error), "strict")


def check_6_4(exercise, rank, world_size):
    """Model, optimizer and training are the check's own: save() and load() must be complete."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.95)
    again = DistributedDataParallel(torch.nn.Linear(1, 1))
    resumed = torch.optim.SGD(again.parameters(), lr=0.03, momentum=0.95)
    batches = torch.randn(10, 8, 1)
    train(model, optimizer, batches[:5])
    exercise.save(PATH, model, optimizer)
    dist.barrier()
    exercise.load(PATH, again, resumed)
    yield Fact("with this check's model, after loading, weights", again, right=flat(model))
    train(model, optimizer, batches[5:])
    train(again, resumed, batches[5:])
    yield Fact("with this check's model, 5 steps after loading, weights", again, right=flat(model))
    losses = exercise.train(*exercise.begin(), 10)
    yield Fact("loss", losses[-1], most=losses[0])


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
