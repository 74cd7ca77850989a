import tempfile
from itertools import accumulate
from pathlib import Path

import torch
from exercises.common import Fact, Messages, at_each_step, attempt, flat
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


def check_13_1(exercise, rank, world_size):
    held = []  # more points with a forward pass, fewer after its backward

    def note(layer, inputs, output):
        held.append(len(output))
        output.register_hook(lambda gradient: held.append(-len(gradient)))

    torch.manual_seed(1)
    net = torch.nn.Linear(2, 1)
    net.register_forward_hook(note)
    x, y = torch.randn(world_size, 9, 2), torch.zeros(world_size, 9, 1)
    model = DistributedDataParallel(net)
    with Messages() as sent:
        group = list(zip(x[rank].split(4), y[rank].split(4)))
        exercise.step(model, SGD(net.parameters(), lr=0.5), group)
    yield Fact("after batches of 4, 4 and 1 points the weights are", net, "mean")
    yield Fact("messages in a step:", sent.calls.get("allreduce"), "messages")
    most = max(accumulate(held), default=0)
    yield Fact("points that it holds at a time:", most, "memory", most=4)


def check_13_2(exercise, rank, world_size):
    # The lengths of the true gradients: longer ones than 1 are clipped, scaled or not.
    for size, scaled in ((0.5, True), (8.0, True), (0.5, False), (8.0, False)):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, size / 2)
        optimizer = SGD(model.parameters(), lr=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        exercise.step(model, optimizer, scaler, torch.ones(1, 1), torch.zeros(1, 1))
        moved = size / 2 - model.weight.item()
        length = f"{size:g}" if scaled else f"{size:g}, not scaled,"
        yield Fact(f"a gradient of length {length} moved the weight by", moved)
    before = flat(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    exercise.step(model, optimizer, scaler, torch.full((1, 1), 99.0), torch.zeros(1, 1))
    yield Fact("a gradient that overflows leaves the weight at", model, right=before)
    yield Fact("it makes the scale smaller:", scaler.get_scale() < 2.0**127)


def check_13_3(exercise, rank, world_size):
    whole = torch.arange(8.0 * world_size).view(-1, 2).square() / 10
    weights = torch.linspace(-1, 2, whole.numel()).view(-1, 2).cos()
    own = slice(4 * rank, 4 * rank + 4)
    mine, expected = whole[own].clone().requires_grad_(), whole.clone().requires_grad_()
    layer, reference = exercise.BatchNorm(2), torch.nn.BatchNorm1d(2, affine=False)
    output, outputs = layer(mine), reference(expected)
    (output * weights[own]).sum().backward()
    (outputs * weights).sum().backward()
    yield Fact("output", output, right=flat(outputs[own]))
    yield Fact("running mean", layer.running_mean, right=flat(whole.mean(0) / 10))
    yield Fact("gradients", mine.grad, right=flat(expected.grad[own]))


def check_13_4(exercise, rank, world_size):
    for part, classes, others in (
        ("val", "abc", "abc"),
        ("test", "abcdefghijkl", "abcdefghijkl"),
        ("val", "abc", "acd"),
    ):
        folder = Path(tempfile.mkdtemp(dir="."))
        exercise.draw(folder / "train", classes)
        exercise.draw(folder / part, others)
        data, error = attempt(exercise.load_folder, folder)
        text = f"train/ and {part}/ with {len(classes)} classes:"
        if classes != others:
            refused = bool(error and "ValueError" in error)
            yield Fact(
                "ValueError if a class is missing, and another new:", refused, "missing"
            )
            continue
        yield Fact(f"{text} loading ended with error:", error, "folder")
        if error:
            return
        train_set, test_set = data
        yield Fact(f"{text} test pictures:", len(test_set), "folder")
        scores = exercise.make_model(train_set)(test_set[0][0].unsqueeze(0))
        yield Fact(f"{text} scores for a picture:", scores.shape[-1], "scores")


def check_13_5(exercise, rank, world_size):
    def look(optimizer):  # at the parameters with a gradient
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        return [x for x in parameters if x.grad is not None]

    trained = at_each_step(look)
    model = exercise.train(rank, world_size)
    steps = [
        i for i, parts in enumerate(trained) if any(x is model[0].weight for x in parts)
    ]
    yield Fact("parameters", model)
    yield Fact("the first layer is trained in steps", steps)
