"""Trains a tiny model with one silent fault after the other, and notes what comes of each.

Run on every rank by test_silent.py, and as one process: that is the reader's own program, too, with
the same fault in it. The argument is the page day2/SILENT.md, whose checks are used.
At the end rank 0 prints JSON: {program or fault: {"says": what the checks say, "losses", "norms"
of the gradients and "rates": of the steps, "messages": of DDP, "first": samples and "scores": of
each epoch, "repeats": whether the same test twice gives the same, with dropout}}.
"""

import copy
import hashlib
import io
import json
import math
import re
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

# A fault, and the program in which it is planted.
FAULTS = {
    "copies of the data differ": "plain",
    "a different random split on each rank": "plain",
    "ranks have frozen different layers": "plain",
    "ranks number the classes differently": "plain",
    "ranks have other options": "plain",
    "only rank 0 calls `train()`": "dropout",
    "one rank skips a step": "plain",
    "one rank's batches are smaller": "plain",
    "every rank has the same data": "plain",
    "every rank reads all data": "plain",
    "some test images count twice": "plain",
    "all ranks test the same part": "plain",
    "the test's result is not added up": "plain",
    "other first weights": "by hand",
    "the forward pass goes through `.module`": "plain",
    "an old checkpoint on one rank": "plain",
    "a layer is unfrozen after wrapping": "plain",
    "buffers are not synchronized": "buffers",
    "averaged weights (EMA) on rank 0 only": "EMA",
    "the rate follows a rank's own score": "rate by score",
    "the best model is chosen by a rank's own score": "plain",
    "`set_epoch` on rank 0 only": "plain",
    "no `set_epoch`": "plain",
    "one rank's data is shifted": "plain",
    "gradients are added up, not averaged": "by hand",
    "the loss is multiplied by the world size": "plain",
    "the loss is a sum over the batch": "plain",
    "the loss is a weighted mean": "plain",
    "an optimizer sees a rank's rows only": "Muon",
    "gradients are added up, but with Adam": "by hand, Adam",
    "the loss is multiplied, but with Adam": "Adam",
    "the scheduler takes a step for each rank": "schedule",
    "the test's F1 is averaged over the ranks": "plain",
    "`no_sync` around `backward` only": "two batches a step",
    "the same dropout on all ranks": "dropout",
    "a test without `eval()`": "dropout",
    "labels of other images": "plain",
}
GLOBAL_BATCH, EVERY, EPOCHS = 12, 3, 2
MIDDLE = {"dropout": nn.Dropout, "buffers": lambda: nn.BatchNorm1d(16)}
SOURCE = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(131, 8, generator=SOURCE), torch.randint(3, (131,), generator=SOURCE)
TEST = TensorDataset(IMAGES[:31], LABELS[:31])  # neither 2 nor 3 nor 5 ranks share 31 evenly


def make_model(program, seed=0):
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    middle = MIDDLE.get(program, nn.Identity)()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), middle, nn.Linear(16, 3))
    if "Adam" in program:
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def load_data(wrong, rank, program):
    """Return most samples for training, and names and labels of all that this rank has."""
    numbers = list(range(130))
    if wrong == "copies of the data differ" and rank == 1:
        numbers[7] = 130  # another one, so there are as many as before
    labels = LABELS.roll(1) if wrong == "labels of other images" else LABELS
    seed = rank if wrong == "a different random split on each rank" else 0
    data = TensorDataset(IMAGES[numbers], labels[numbers])
    parts = [119, 11] if program == "dropout" else [120, 10]  # with 119, samplers repeat some
    train_set, _ = random_split(data, parts, torch.Generator().manual_seed(seed))
    return train_set, [(f"{number}.png", labels[number].item()) for number in numbers]


def wrap(plain, sent):
    """Return the model in DDP, which notes in sent each message that it sends."""
    model = DistributedDataParallel(plain)

    def hook(_, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    return model


def part_of(sampler, wrong, rank):
    """Return the indices of a rank's images in this epoch."""
    indices = list(sampler)
    if wrong == "every rank reads all data":
        generator = torch.Generator().manual_seed(sampler.epoch * dist.get_world_size() + rank)
        return torch.randperm(len(sampler.dataset), generator=generator).tolist()
    if wrong == "one rank's data is shifted" and rank == 1:
        return indices[3:] + indices[:3]
    return indices


def gradients(wrong, program, model, plain, images, labels, last):
    """Compute the gradients of a batch, averaged over the ranks. Return its loss."""
    world_size = dist.get_world_size()
    forward = plain if wrong == "the forward pass goes through `.module`" else model
    silent = model.no_sync() if program == "two batches a step" and not last else nullcontext()
    late = wrong == "`no_sync` around `backward` only"
    reduction = "sum" if wrong == "the loss is a sum over the batch" else "mean"
    weight = torch.arange(1.0, 4) if wrong == "the loss is a weighted mean" else None
    with nullcontext() if late else silent:
        loss = F.cross_entropy(forward(images), labels, weight, reduction=reduction)
        factor = world_size if (wrong or "").startswith("the loss is multiplied") else 1
        factor /= 2 if program == "two batches a step" else 1
        with silent if late else nullcontext():
            (factor * loss).backward()
    if program.startswith("by hand"):
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            if not (wrong or "").startswith("gradients are added up"):
                parameter.grad /= world_size
    if program == "Muon":  # each rank computes its rows of the step
        gradient = plain[0].weight.grad
        own = torch.arange(len(gradient)).tensor_split(world_size)[dist.get_rank()]
        rows = orthogonal(gradient[own]) if wrong else orthogonal(gradient)[own]
        plain[0].weight.grad = torch.zeros_like(gradient).index_copy(0, own, rows)
        dist.all_reduce(plain[0].weight.grad)
    return loss.detach()


def orthogonal(matrix):
    """Return a matrix made orthogonal by Newton-Schulz, as the optimizer Muon does."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        y = x @ x.T
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return x


def train(program, wrong, page, seen):
    """Train with a fault, or without one if wrong is None. Fill in seen."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check = page["check_ranks"]
    train_set, samples_here = load_data(wrong, rank, program)
    page["check_data"](samples_here, "cpu")
    page["check_data"](train_set.indices, "cpu")
    classes = [0, 1, 2][:: -1 if wrong == "ranks number the classes differently" and rank else 1]
    page["check_data"](classes, "cpu", "list of classes")
    options = [("dropout", "0.5" if wrong == "ranks have other options" and rank else "0")]
    page["check_data"](options, "cpu", "list of options")
    plain, optimizer = make_model(program, rank if wrong == "other first weights" else 0)
    decay = 1 / 3e7 if program == "schedule" else 0  # so slow that ten steps hardly differ
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - decay * step)
    if wrong == "ranks have frozen different layers":
        plain[3 * min(rank, 1)].requires_grad_(False)
    trained = [(name, x.requires_grad) for name, x in plain.named_parameters()]
    page["check_data"](trained, "cpu", "list of frozen layers")
    if wrong == "an old checkpoint on one rank" and rank == 1:
        for parameter in plain.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.01)
    plain[0].requires_grad_(wrong != "a layer is unfrozen after wrapping")
    sent = []
    model = plain if program.startswith("by hand") else wrap(plain, sent)
    plain[0].requires_grad_(True)
    plain.train(rank == 0 or wrong != "only rank 0 calls `train()`")
    if program == "dropout":
        torch.manual_seed(0 if wrong == "the same dropout on all ranks" else rank)
    two = program == "two batches a step"
    batch_size = GLOBAL_BATCH // world_size // (2 if two else 1)
    if wrong == "one rank's batches are smaller" and rank == 1:
        batch_size -= 1
    place = 0 if wrong == "every rank has the same data" else rank
    sampler = DistributedSampler(train_set, world_size, place)
    tested = copy.deepcopy(plain) if program == "EMA" else plain
    losses = []
    seen |= {"first": [], "norms": [], "rates": [], "scores": []}
    backwards = samples = 0
    for epoch in range(EPOCHS):
        if wrong != "no `set_epoch`" and (rank == 0 or wrong != "`set_epoch` on rank 0 only"):
            sampler.set_epoch(epoch)
        visits = torch.zeros(len(train_set), dtype=torch.int64)
        data = page["Indexed"](train_set)
        loader = DataLoader(data, batch_size, sampler=part_of(sampler, wrong, rank))
        seen["first"].append(list(loader.sampler)[:5])
        for number, (indices, (images, labels)) in enumerate(loader, start=1):
            if wrong == "one rank skips a step" and rank == 1 and number == 2:
                continue
            last = not two or number % 2 == 0
            losses.append(gradients(wrong, program, model, plain, images, labels, last))
            backwards += 1
            samples += len(labels)
            visits += torch.bincount(indices, minlength=len(train_set))
            if backwards == 1 or backwards % EVERY == 0:
                training = torch.tensor([module.training for module in plain.modules()])
                named = [("train or eval mode", training), *plain.named_parameters()]
                check(number, samples, indices, named)
            if last:
                seen["norms"].append(nn.utils.clip_grad_norm_(plain.parameters(), math.inf).item())
                seen["rates"] += scheduler.get_last_lr()
                optimizer.step()
                optimizer.zero_grad()
                late = wrong == "the scheduler takes a step for each rank"
                for _ in range(world_size if late else 1):
                    scheduler.step()
            if tested is not plain and (rank == 0 or not wrong):
                for average, weight in zip(tested.parameters(), plain.parameters()):
                    average.data.lerp_(weight.data, 0.5)
        page["check_visits"](sum_over_ranks(visits), spare=world_size - 1)
        for buffer in tested.buffers() if wrong != "buffers are not synchronized" else []:
            dist.broadcast(buffer, src=0)
        here = torch.tensor([rank])
        check(number, samples, here, [*tested.named_parameters(), *tested.named_buffers()])
        score, own = test(tested.train(wrong == "a test without `eval()`"), wrong, page)
        seen["repeats"] = torch.equal(tested(IMAGES), tested(IMAGES))
        plain.train()
        if program == "rate by score":
            optimizer.param_groups[0]["lr"] /= 1 + (own if wrong else score).item()
        rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
        best_by = own if wrong == "the best model is chosen by a rank's own score" else score
        check(number, samples, here, [("learning rate", rates), ("score", best_by)])
        seen["scores"].append(score.item())
    losses = sum_over_ranks(torch.stack(losses)) / world_size
    seen["losses"] = losses.view(-1, 2 if two else 1).mean(dim=1).tolist()
    seen["messages"] = len(sent)


def sum_over_ranks(tensor):
    """Return the sum of a tensor over the ranks, in its place."""
    dist.all_reduce(tensor)
    return tensor


def test(model, wrong, page):
    """Test on all ranks, as the page does. Return the F1, and that of this rank's part."""
    first = 0 if wrong == "all ranks test the same part" else dist.get_rank()
    indices = list(range(first, len(TEST), dist.get_world_size()))
    if wrong == "some test images count twice":
        indices = list(DistributedSampler(TEST))
    found, right = model(IMAGES[indices]).argmax(dim=1) > 0, LABELS[indices] > 0
    sums = torch.stack([(found & right).sum() * 2, found.sum() + right.sum()])
    total = torch.cat([sums, torch.bincount(torch.tensor(indices), minlength=len(TEST))])
    if wrong != "the test's result is not added up":
        dist.all_reduce(total)
    page["check_visits"](total[2:])
    own = sums[0] / sums[1]
    if wrong == "the test's F1 is averaged over the ranks":
        return sum_over_ranks(own.clone()) / dist.get_world_size(), own
    return total[0] / total[1], own


def main():
    page = {"dist": dist, "hashlib": hashlib, "json": json, "sys": sys, "torch": torch}
    text = Path(sys.argv[1]).read_text()
    for function in re.findall(r"^```python\n((?:def|class) .*?)^```", text, re.M | re.S):
        exec(function, page)
    dist.init_process_group("gloo")
    results = {}
    for name, program in ({x: x for x in FAULTS.values()} | FAULTS).items():
        wrong = name if name in FAULTS else None
        seen = results[name] = {"says": None}
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                train(program, wrong, page, seen)
        except SystemExit:  # every rank comes here, or none; rank 0 has said why
            seen["says"] = said.getvalue().strip()
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
