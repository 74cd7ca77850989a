import torch
import torch.distributed as dist
from exercises.common import attempt, flat, gap, noted, short, train_alone
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset


def check_4_1(exercise, rank, world_size, report):
    x, y = exercise.make_points()
    calls = noted(torch.nn.Linear, "forward")
    model, losses = exercise.train(x, y, rank, world_size)
    used = len(calls[0][0][1])
    torch.manual_seed(0)
    alone = torch.nn.Linear(x.shape[1], 1)
    train_alone(alone, [(x, y)] * len(losses), clip=1.0, lr=0.1)
    report.like_one_process(model, alone, 1e-3)
    report.equal("points that it takes in a step:", used, len(x) // world_size)


def check_4_3(exercise, rank, world_size, report):
    x = torch.linspace(-2, 2, 32)[:, None]
    y = torch.sin(x)
    model = exercise.train(x, y, rank, world_size)
    report.at_most("loss", mse_loss(model(x), y).item(), 0.1)
    seen = yield flat(model)
    report.same_on_all_ranks(seen, 1e-6)


def check_4_4(exercise, rank, world_size, report):
    first, second = [exercise.my_part(21, epoch, rank, world_size).tolist() for epoch in range(2)]
    report.new_order(first, second)
    report(first != sorted(first), f"epoch 0 begins with {short(first)} (right: shuffled)")
    part = exercise.my_part(20, 0, rank, world_size)
    report.equal("images that it gets of 20:", len(part), 20 // world_size)
    seen = yield first, second
    report.each_once("images", seen, 21)


IMAGES, BATCH, EPOCHS = 96, 8, 2  # of exercise 4.5


def check_4_5(exercise, rank, world_size, report):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (IMAGES, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (IMAGES,), generator=generator)
    calls = noted(TensorDataset, "__getitem__")
    exercise.MAX_STEPS = None
    model, losses = exercise.train(TensorDataset(images, labels), BATCH, EPOCHS)
    used = torch.tensor([int(index) for (_, index), _ in calls]).view(EPOCHS, -1)
    report.new_order(*used.tolist())
    one = torch.nn.Linear(1, 1)
    one.weight.requires_grad = False
    one.bias.grad = torch.full_like(one.bias, rank + 1.0)
    _, error = attempt(exercise.average_gradients, one)
    # One process, with the images that all ranks together had in each step.
    parts = [None] * world_size
    dist.all_gather_object(parts, used)
    steps = [x.flatten() for epoch in torch.stack(parts, 1) for x in epoch.split(BATCH, 1)]
    torch.manual_seed(0)
    alone = exercise.Net()
    data = [[x.index_select(0, step) for x in (images, labels)] for step in steps]
    right = train_alone(alone, data, cross_entropy, lr=0.015, momentum=0.9)
    seen = yield used.tolist(), one.bias.grad.item(), error, flat(model), gap(losses, right)
    used, means, errors, parameters, gaps = zip(*seen)
    report.each_once("images", used, IMAGES)
    text = "all ranks: with a weight that is frozen, average_gradients() "
    text += errors[0] or f"turns 1, 2, 3, 4 into {short(means)}"
    report(set(means) == {2.5}, f"{text} (right: 2.5 on each)")
    report.same_on_all_ranks(parameters, 0)
    text = "rank 0: its losses differ from one process's, with all ranks' images, by up to"
    report.at_most(text, gaps[0], 1e-5)
