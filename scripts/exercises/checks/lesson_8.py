"""What the check of each exercise of lesson 8 does."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss


def check_8_1(exercise, rank, world_size, report):
    """The loss of train(), its learning rate and global batch, here and alone."""
    points = exercise.make_points()
    x, y = points.tensors
    results = []
    for place, size in ((rank, world_size), (0, 1)):
        model, steps, lr = exercise.train(points, place, size)
        results.append((round(len(x) / steps), lr, mse_loss(model(x), y).item()))
    (batch, lr, loss), (batch_alone, lr_alone, loss_alone) = results
    text = f"loss {loss:.2g} after the epoch, alone {loss_alone:.2g}"
    if report(loss < 1e-4, f"{text} (limit 0.0001)"):
        right = lr_alone * batch / batch_alone
        report.numbers(f"with a global batch of {batch} the learning rate is", [lr], [right])


def check_8_2(exercise, rank, world_size, report):
    """The learning rates of 8 steps, 4 of them warm-up, with three world sizes."""
    for size in (1, 4, world_size):
        expected = [0.01 * (1 + (size - 1) * min(1, step / 4)) for step in range(8)]
        report.numbers(f"with world size {size}:", exercise.learning_rates(8, 4, size), expected)


def check_8_3(exercise, rank, world_size, report):
    """The points, the first step and the report of train(), each symptom by itself.

    It's a capstone, so it tells only symptoms, each one whatever the other faults do.
    """
    points = exercise.make_points()
    original, forwards = exercise.make_model, []

    def make_model():
        model = original()
        model.register_forward_pre_hook(lambda _, inputs: forwards.append(inputs[0].clone()))
        return model

    exercise.make_model = make_model
    step, moves = torch.optim.SGD.step, []

    def noting(optimizer, *arguments, **options):
        weights = optimizer.param_groups[0]["params"][0]
        before, rate = weights.detach().clone(), optimizer.param_groups[0]["lr"]
        step(optimizer, *arguments, **options)
        moves.append(((before - weights.detach()).norm().item(), rate))

    torch.optim.SGD.step = noting
    exercise.train(points, rank, world_size)
    # The gradient of the batches that the ranks really had in their first step.
    table = {tuple(x.tolist()): y for x, y in zip(*points.tensors)}
    parts = [None] * world_size
    dist.all_gather_object(parts, [tuple(x) for x in forwards[0].tolist()])
    torch.manual_seed(0)
    model = original()
    x = torch.tensor([x for part in parts for x in part])
    mse_loss(model(x), torch.stack([table[tuple(row)] for row in x.tolist()])).backward()
    way, rate = moves[0]
    ratio = way / (rate * next(model.parameters()).grad.norm().item())
    steps = len(moves) // exercise.EPOCHS
    visits = [tuple(x) for x in torch.cat(forwards[:steps]).tolist()]
    mean = exercise.over_all_ranks(torch.tensor([1.0 + rank]), world_size).item()
    return steps, visits, ratio, rate, mean


def compare_8_3(seen, report):
    size, steps = len(seen), max(mine[0] for mine in seen)
    points = len({point for _, points, *_ in seen for point in points})
    text = f"work: {2 * steps} steps on each of {size} ranks, right: {128 // size}"
    text = f"{text}; points in the first epoch: {points}, right: 1024"
    report(steps == 64 // size and points == 1024, text)
    far = max((ratio for _, _, ratio, *_ in seen), key=lambda ratio: abs(ratio - 1))
    text = f"step: the first one is {far:.2f} times as long as gradient and rate say"
    report(abs(far - 1) < 0.01, f"{text} (right: 1, limit 0.01)")
    *_, rate, mean = seen[0]
    report.numbers(f"step: the learning rate on {size} ranks is", [rate], [0.05 * size])
    numbers = ", ".join(str(1 + rank) for rank in range(size))
    text = f"report: losses {numbers} of the ranks are reported as"
    report.numbers(text, [mean], [(size + 1) / 2])
