from itertools import chain

import torch
from exercises.common import Fact, at_each_step, attempt, gather, indices, noted
from torch.nn.functional import mse_loss


def check_8_1(exercise, rank, world_size):
    points = exercise.make_points()
    x, y = points.tensors
    rates = at_each_step(lambda optimizer: optimizer.param_groups[0]["lr"])
    runs = []  # the rate and the steps on 1, 2 and 4 ranks
    for ranks in (1, 2, world_size):
        rates.clear()
        model = exercise.train(points, rank % ranks, ranks)[0]
        runs.append((rates[0], len(rates)))
    yield Fact("loss after the epoch", mse_loss(model(x), y).item(), most=1e-4)
    alone, most_steps = runs[0]
    for rate, steps in runs[:0:-1]:
        what = f"with a global batch of {len(x) // steps} the rate is"
        yield Fact(what, rate, right=alone * most_steps / steps)


def check_8_3(exercise, rank, world_size):
    """The result of train(), then its points, its first step and its report.

    It's a capstone, so the result comes first: as long as it's wrong, a learner sees
    only that.
    """
    points = exercise.make_points()
    calls = noted(type(points), "__getitem__")

    def look(optimizer):
        group = optimizer.param_groups[0]
        return group["lr"], group["params"][0].grad.norm().item()

    steps = at_each_step(look)
    _, losses = exercise.train(points, rank, world_size)
    # Any order of the points will do: the means of different ones differ by about 1%.
    yield Fact("result: the mean loss of all steps is", losses.mean(), close=0.02)
    epochs = exercise.EPOCHS
    used = indices(calls)
    first, second = used[: len(used) // epochs], used[len(used) // epochs :]
    yield Fact(
        f"work: steps of an epoch on {world_size} ranks:", len(steps) // epochs, "work"
    )
    seen = {*chain(*gather(first))}
    yield Fact("work: points in the first epoch:", len(seen), "work")
    yield Fact(
        "work: the order of epoch 1 is that of epoch 0:", first == second, "work"
    )
    batch = [*chain(*gather(used[: len(used) // len(steps)]))]
    torch.manual_seed(0)
    model = exercise.make_model()
    x, y = [tensor[batch] for tensor in points.tensors]
    mse_loss(model(x), y).backward()
    right = next(model.parameters()).grad.norm().item()
    what = "step: length of the first gradient:"
    yield Fact(what, steps[0][1], "step", right=right)
    rates = [steps[0][0]]
    for ranks in (2, 1):
        steps.clear()
        # With 2 it may fail when it gathers losses: there are 4 ranks in the group.
        attempt(exercise.train, points, rank % ranks, ranks)
        rates.append(steps[0][0])
    what = f"step: learning rate on {world_size}, 2 and 1 ranks:"
    yield Fact(what, rates, "step")
    mean = exercise.over_all_ranks(torch.tensor([1.0 + rank]), world_size)
    yield Fact(
        "report: losses 1, 2, 3, 4 of the ranks are reported as",
        mean,
        "report",
        right=2.5,
    )
