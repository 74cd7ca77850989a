from itertools import chain

import torch
import torch.distributed as dist
from exercises.common import noted, train_alone
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook


def check_8_1(exercise, rank, world_size, report):
    points = exercise.make_points()
    x, y = points.tensors
    model, steps, lr = exercise.train(points, rank, world_size)
    _, steps_alone, lr_alone = exercise.train(points, 0, 1)
    if report.at_most("loss after the epoch", mse_loss(model(x), y).item(), 1e-4):
        text = f"with a global batch of {len(x) // steps} the learning rate is"
        report.numbers(text, [lr], [lr_alone * steps_alone / steps])


def check_8_2(exercise, rank, world_size, report):
    for size in (1, 4, world_size):
        expected = [0.01 * (1 + (size - 1) * min(1, step / 4)) for step in range(8)]
        report.numbers(f"with world size {size}:", exercise.learning_rates(8, 4, size), expected)


def check_8_3(exercise, rank, world_size, report):
    """The result of train(), then its points, its first step and its report, each by itself.

    It's a capstone, so the result comes first: as long as it's wrong, a learner sees only that.
    """
    points = exercise.make_points()
    calls = noted(type(points), "__getitem__")
    steps = []

    def note(optimizer, arguments, options):
        group = optimizer.param_groups[0]
        steps.append((group["lr"], group["params"][0].grad.norm().item()))

    hook = register_optimizer_step_pre_hook(note)
    _, losses = exercise.train(points, rank, world_size)
    hook.remove()
    used = [int(index) for (_, index), _ in calls]
    # The gradient of the batches that the ranks really had in their first step.
    batches = [None] * world_size
    dist.all_gather_object(batches, used[: len(used) // len(steps)])
    batch = list(chain(*batches))
    torch.manual_seed(0)
    model = exercise.make_model()
    x, y = points.tensors
    mse_loss(model(x[batch]), y[batch]).backward()
    rate, length = steps[0]
    ratio = length / next(model.parameters()).grad.norm().item()
    mean = exercise.over_all_ranks(torch.tensor([1.0 + rank]), world_size).item()
    epochs, generator = exercise.EPOCHS, torch.Generator()
    # One process, with the batches that all ranks together should have.
    orders = [torch.randperm(len(x), generator=generator.manual_seed(n)) for n in range(epochs)]
    batches = chain(*(order.split(exercise.BATCH_SIZE * world_size) for order in orders))
    torch.manual_seed(0)
    alone = exercise.make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=exercise.LR * world_size)
    right = train_alone(alone, optimizer, [(x[batch], y[batch]) for batch in batches])
    result = losses.mean().item(), sum(right) / len(right)
    return result, len(steps) // epochs, used[: len(used) // epochs], ratio, rate, mean


def compare_8_3(seen, report):
    size = len(seen)
    ((loss, right), *_), steps, used, ratios, (rate, *_), (mean, *_) = zip(*seen)
    report.numbers("result: the mean loss of all steps is", [loss], [right])
    report.equal(f"work: steps of an epoch on each of {size} ranks:", max(steps), 64 // size)
    report.equal("work: points in the first epoch:", len(set(chain(*used))), 1024)
    far = max(ratios, key=lambda ratio: abs(ratio - 1))
    text = f"step: the first one is {far:.2f} times as long as gradient and rate say"
    report(abs(far - 1) < 0.01, f"{text} (right: 1, limit 0.01)")
    report.numbers(f"step: the learning rate on {size} ranks is", [rate], [0.05 * size])
    report.numbers("report: losses 1, 2, 3, 4 of the ranks are reported as", [mean], [2.5])
