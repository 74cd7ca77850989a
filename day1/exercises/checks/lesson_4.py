import torch
from exercises.common import (
    Fact,
    at_each_step,
    attempt,
    flat,
    gap,
    gather,
    indices,
    noted,
    once,
)
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset


def check_4_1(exercise, rank, world_size):
    calls = noted(torch.nn.Linear, "forward")
    points = exercise.make_points()
    model, _ = exercise.train(*points, rank, world_size)
    yield Fact("parameters", model)
    taken = sum(len(x) for (_, x), _ in calls)
    yield Fact("points that it takes in all steps:", taken)
    yield Fact("parameters, if it trains alone,", exercise.train(*points, 0, 1)[0])


def check_4_3(exercise, rank, world_size):
    x = torch.linspace(-2, 2, 32)[:, None]
    inputs = noted(torch.nn.Linear, "forward")
    steps = at_each_step(lambda optimizer: flat(optimizer.param_groups[0]["params"]))
    model = exercise.train(x, x.sin(), rank, world_size)
    yield Fact("loss", mse_loss(model(x), x.sin()).item(), most=0.1)
    noise = inputs[0][0][1] - x[rank::world_size]
    models, noises = zip(*gather(([*steps, flat(model)], noise[:4].tolist())))
    what = "the most by which parameters differ from rank 0's, in any step:"
    yield Fact(what, gap(models[rank], models[0]), most=1e-6)
    same = sum(gap(noise, noises[rank]) < 1e-5 for noise in noises)
    yield Fact("ranks that have its noise:", same, right=1)


def check_4_4(exercise, rank, world_size):
    first, second = [
        exercise.my_part(21, epoch, rank, world_size).tolist() for epoch in (0, 1)
    ]
    yield Fact("the order of epoch 1 is that of epoch 0:", first == second, "shuffle")
    yield Fact("epoch 0 is in order:", first == sorted(first), "shuffle")
    part = exercise.my_part(20, 0, rank, world_size)
    yield Fact("images that it gets of 20:", len(part), "divide")
    for epoch, images in enumerate((first, second)):
        seen = once(gather(images), 21)
        yield Fact(f"images seen exactly once in epoch {epoch}:", seen, "divide")
    parts = [exercise.my_part(21, 0, other, 5).tolist() for other in range(5)]
    yield Fact("images that 5 ranks see exactly once:", once(parts, 21), "divide")


def check_4_5(exercise, rank, world_size):
    images = torch.randint(256, (96, 28, 28), dtype=torch.uint8)
    calls = noted(TensorDataset, "__getitem__")
    exercise.MAX_STEPS = None
    model, _ = exercise.train(TensorDataset(images, torch.randint(10, (96,))), 8, 2)
    first, second = torch.tensor(indices(calls)).view(2, -1).tolist()
    yield Fact("the order of epoch 1 is that of epoch 0:", first == second, "epoch")
    for epoch, used in enumerate((first, second)):
        what = f"images seen exactly once in epoch {epoch}:"
        yield Fact(what, once(gather(used), 96), "sampler")
    one = torch.nn.Linear(1, 1)
    one.weight.requires_grad = False
    one.bias.grad = torch.full_like(one.bias, rank + 1.0)
    _, error = attempt(exercise.average_gradients, one)
    yield Fact(
        "with a frozen weight, average_gradients() ended with error:", error, "frozen"
    )
    yield Fact("it turns 1, 2, 3, 4 into", one.bias.grad, "average", right=2.5)
    far = gap(model, gather(flat(model))[0])
    yield Fact(
        "after training, parameters differ from rank 0's by", far, "average", most=0
    )
