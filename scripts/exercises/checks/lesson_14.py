"""What the check of each exercise of lesson 14 does."""

import torch
import torch.distributed as dist
from exercises.common import flat, noted, train_alone


def check_14_1(exercise, rank, world_size, report):
    """What largest() sends and keeps in 6 steps, and where train() ends."""
    gradient, rest = torch.tensor([8.0, -4.0, 2.0]), torch.zeros(3)
    sent = [exercise.largest(gradient.clone(), rest).tolist() for _ in range(6)]
    most = max(sum(x != 0 for x in step) for step in sent)
    report(most == 1, f"sends at most {most} numbers in a step (limit 1)")
    total = [sum(column) for column in zip(*sent, rest.tolist())]
    report.numbers("sent and kept in 6 steps:", total, [48.0, -24.0, 12.0])
    gap = exercise.train(300, rank)
    report(gap < 0.3, f"ends {gap:.2f} from the best numbers (limit 0.3)")


def check_14_2(exercise, rank, world_size, report):
    """The parameters after train(), beside one process's, and how much was sent."""
    mine, messages = exercise.train(rank, world_size, 4)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    points = torch.linspace(-2, 2, 64 * world_size)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_alone(model, optimizer, [(x, 3 * x - 1) for x in points.split(16 * world_size)])
    report.numbers("parameters", mine, flat(model))
    report(messages == 4, f"{messages} messages for 4 steps of the optimizer (right: 4)")


def check_14_3(exercise, rank, world_size, report):
    """The weight of each rank after train(), and how many means were taken."""
    means = noted(dist, "all_reduce")
    mine = flat(exercise.train(rank))
    x = torch.linspace(-2, 2, 16)[:, None]
    shrink = 1 - 2 * 0.05 * x.square().mean().item()  # of the distance to the target, each step
    torch.manual_seed(0)
    weight = torch.nn.Linear(1, 1, bias=False).weight.item()
    target = (world_size + 1) / 2  # the mean of 1, 2, ...: all steps are linear
    if report.numbers("weight", mine, [target + (weight - target) * shrink**20]):
        text = f"the parameters were averaged {len(means)} times"
        report(len(means) == 3, f"{text} (right: 3)")
