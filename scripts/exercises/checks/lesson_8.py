from itertools import chain

import torch
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
        report.numbers(text, lr, lr_alone * steps_alone / steps)


def check_8_3(exercise, rank, world_size, report):
    """The result of train(), then its points, its first step and its report.

    It's a capstone, so the result comes first: as long as it's wrong, a learner sees only that.
    """
    points = exercise.make_points()
    calls = noted(type(points), "__getitem__")
    steps = []

    def note(optimizer, arguments, options):
        group = optimizer.param_groups[0]
        steps.append((group["lr"], group["params"][0].grad.norm().item()))

    register_optimizer_step_pre_hook(note)
    _, losses = exercise.train(points, rank, world_size)
    epochs, count = exercise.EPOCHS, len(steps)
    used = [int(index) for (_, index), _ in calls[: len(calls) // epochs]]
    # One process, with the batches that all ranks together should have.
    batches = []
    for epoch in range(epochs):
        order = torch.randperm(1024, generator=torch.Generator().manual_seed(epoch))
        batches += [points[batch] for batch in order.split(16 * world_size)]
    torch.manual_seed(0)
    model = exercise.make_model()
    alone = train_alone(model, batches, lr=0.05 * world_size)
    (rate, length), (right_rate, right_length) = steps[0], steps[count]
    mean = exercise.over_all_ranks(torch.tensor([1.0 + rank]), world_size)
    seen = yield count // epochs, used, length / right_length
    counts, used, ratios = zip(*seen)
    right = sum(alone) / len(alone)
    report.numbers("result: the mean loss of all steps is", losses.mean(), right)
    report.equal(f"work: steps of an epoch on each of {world_size} ranks:", max(counts), 16)
    report.equal("work: points in the first epoch:", len(set(chain(*used))), 1024)
    far = max(ratios, key=lambda ratio: abs(ratio - 1))
    text = f"step: the first gradient is {far:.2f} times as long as one process's"
    report(abs(far - 1) < 0.01, f"{text} (right: 1, limit 0.01)")
    report.numbers(f"step: the learning rate on {world_size} ranks is", rate, right_rate)
    report.numbers("report: losses 1, 2, 3, 4 of the ranks are reported as", mean, 2.5)
