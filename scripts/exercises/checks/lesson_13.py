import copy
import tempfile
from pathlib import Path

import torch
from exercises.common import attempt, flat, train_alone
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook


def check_13_1(exercise, rank, world_size, report):
    torch.manual_seed(1)
    net = torch.nn.Linear(2, 1)
    alone = copy.deepcopy(net)
    x, y = torch.randn(world_size, 9, 2), torch.zeros(world_size, 9, 1)
    batch = x.flatten(0, 1), y.flatten(0, 1)
    train_alone(alone, [batch], lr=0.5)
    messages = []

    def counting(_, bucket):
        messages.append(bucket.index())
        return allreduce_hook(None, bucket)

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, counting)
    group = list(zip(x[rank].split(4), y[rank].split(4)))
    exercise.step(model, SGD(net.parameters(), lr=0.5), group)
    report.numbers("after batches of 4, 4 and 1 points the weights are", flat(net), flat(alone))
    report.equal("messages in a step:", len(messages), 1)


def check_13_2(exercise, rank, world_size, report):
    for size in (0.5, 8.0):  # the lengths of the true gradients
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, size / 2)
        optimizer = SGD(model.parameters(), lr=1)
        scaler = torch.amp.GradScaler("cpu")
        exercise.step(model, optimizer, scaler, torch.ones(1, 1), torch.zeros(1, 1))
        moved = size / 2 - model.weight.item()
        text = f"a gradient of length {size:g} moved the weight by"
        report.numbers(text, [moved], [min(size, 1.0)])  # longer ones are clipped


def check_13_3(exercise, rank, world_size, report):
    whole = torch.arange(4.0 * world_size)[:, None].square() / 10
    weights = torch.linspace(-1, 2, len(whole))[:, None].cos()
    own = slice(4 * rank, 4 * rank + 4)
    mine, expected = whole[own].clone().requires_grad_(), whole.clone().requires_grad_()
    layer, reference = exercise.BatchNorm(1), torch.nn.BatchNorm1d(1, affine=False)
    output, outputs = layer(mine), reference(expected)
    (output * weights[own]).sum().backward()
    (outputs * weights).sum().backward()
    for what, value, right in (
        ("output", output, outputs[own]),
        ("running mean", layer.running_mean, whole.mean(0) / 10),
        ("gradients", mine.grad, expected.grad[own]),
    ):
        report.numbers(what, value.flatten().tolist(), right.flatten().tolist(), 1e-3)


def check_13_4(exercise, rank, world_size, report):
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
            text = f"a class is missing in {part}/, and there is a new one: {error or 'no error'}"
            report(error and "ValueError" in error, f"{text} (right: ValueError)")
        elif report.no_error(text, error):
            train_set, test_set = data
            report.equal(f"{text} test pictures:", len(test_set), 3 * len(classes))
            scores = exercise.make_model(train_set)(test_set[0][0].unsqueeze(0))
            report.equal(f"{text} scores for a picture:", scores.shape[-1], len(classes))


def check_13_5(exercise, rank, world_size, report):
    trained = []  # in each step, the parameters with a gradient

    def note(optimizer, arguments, options):
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        trained.append([x for x in parameters if x.grad is not None])

    hook = register_optimizer_step_pre_hook(note)
    model = exercise.train(rank, world_size)
    hook.remove()
    # With all points on each rank there is nothing to average, so this is how one process trains.
    report.like_one_process(model, exercise.train(0, 1))
    steps = [i for i, parts in enumerate(trained) if any(x is model[0].weight for x in parts)]
    report.equal("the first layer is trained in steps", steps, list(range(10, 20)))
