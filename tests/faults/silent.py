"""Trains a tiny model with the boxes of day2/SILENT.md, with one silent fault after the other.

Run on every rank by test_silent.py, and as one process: that is the reader's own program, too, with
the same fault in it. The argument is the page. At the end rank 0 prints JSON: {program or fault:
{"says": what the checks say, "printed": by rank 0}}.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from textwrap import indent

import torch
import torch.distributed as dist

# The reader's own program, with the boxes in it.
SCRIPT = """
import copy
import math
from types import SimpleNamespace

import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

seed, epochs, device = 0, 2, torch.device("cpu")
me, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(seed)
images, labels = torch.randn(134, 8), torch.randint(3, (134,))
test_set = TensorDataset(images[:31], labels[:31])  # neither 2 nor 3 ranks share 31 evenly
numbers = list(range(133))
data = TensorDataset(images[numbers], labels[numbers])
data.root, data.classes = "here", [0, 1, 2]
data.samples = [(f"here/{{x}}.png", y.item()) for x, y in zip(numbers, data.tensors[1])]
args = SimpleNamespace(data="here", dropout=0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Identity(), nn.Linear(16, 3))
{start}ddp_model = DistributedDataParallel(plain)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
schedule = LambdaLR(optimizer, lambda step: 1 - step / 3e7)  # in ten steps, it hardly differs
scheduler = ReduceLROnPlateau(optimizer, "max", patience=epochs)
torch.manual_seed(seed + me)
sampler = DistributedSampler(train_set)
loader = DataLoader(Indexed(train_set), 12 // ranks, sampler=sampler)
own = {own}
test_loader = DataLoader(Subset(Indexed(test_set), own), 8)
tested = plain
plain.train()

def test(tested):
    tested.eval()
    with torch.no_grad():
{test}        print("repeats", torch.equal(tested(data.tensors[0]), tested(data.tensors[0])))
    tested.train()
    return accuracy

{loop}"""
FORWARD = "        loss = F.cross_entropy(ddp_model(images.to(device)), labels.to(device))\n"
BACKWARD, STEP = "        loss.backward()\n", "        optimizer.step()\n"
EPOCH = "    sampler.set_epoch(epoch)\n"
ADAM = ("SGD(plain.parameters(), lr=0.05, momentum=0.9)", "Adam(plain.parameters(), lr=0.01)")
BY_HAND = [
    ("DistributedDataParallel(plain)", "plain"),
    (BACKWARD, f"{BACKWARD}        average(plain, ranks)\n"),
]
# What a program has in place of some lines.
PROGRAMS = {
    "plain": [],
    "dropout": [("nn.Identity()", "nn.Dropout()"), ("range(133)", "range(132)")],  # samplers repeat
    "buffers": [("nn.Identity()", "nn.BatchNorm1d(16)")],
    "by hand": BY_HAND,
    "by hand, Adam": [*BY_HAND, ADAM],
    "Adam": [ADAM],
    "EMA": [
        ("tested = plain", "tested = copy.deepcopy(plain)"),
        (STEP, f"{STEP}        follow(tested, plain)\n"),
    ],
    "rate by score": [("scheduler.step(score)", "optimizer.param_groups[0]['lr'] /= 1 + score")],
    "F1": [
        ("zeros(1, ", "zeros(2, "),
        ("(predicted == labels.to(device)).sum()", "f1_parts(predicted > 0, labels > 0)"),
        ("total[1:]", "total[2:]"),
        ("total[0].item() / len(test_set)", "(total[0] / total[1]).item()"),
    ],
}
IF_ONE, LOADER = "        if me == 1 and number == 2:\n            continue\n", "\ntest_loader"
OWN = ("return accuracy", "return correct.item() / len(own)")
SUM, TIMES = ("(plain, ranks)", "(plain, 1)"), ("loss.backward()", "(ranks * loss).backward()")
WRAP = "ddp_model = DistributedDataParallel(plain)"
UNFREEZE = f"""
plain[0].requires_grad_(False)
{WRAP}
plain[0].requires_grad_(True)
"""
FROZEN = "\nplain[me % 2 * 3].requires_grad_(False)\ntrained"
OLD = """
if me == 1:
    optimizer.state[plain[0].weight]["momentum_buffer"] = torch.full((16, 8), 0.01)
schedule ="""
EACH = "[schedule.step() for _ in range(ranks)]"
TWICE = f"\nown = [*DistributedSampler(test_set)]{LOADER}"
# A fault, by the program in which it is planted: what is changed there, and into what.
FAULTS = {
    "plain": {
        "copies of the data differ": ("\ndata =", "\nnumbers[7] += 126 * (me == 1)\ndata ="),
        "a different random split on each rank": ("().manual_seed(seed)", "().manual_seed(me)"),
        "ranks have frozen different layers": ("\ntrained", FROZEN),
        "ranks number the classes differently": ("[0, 1, 2]", "[me, 1, 2]"),
        "ranks have other options": ("dropout=0", "dropout=me"),
        "one rank skips a step": (FORWARD, IF_ONE + FORWARD),
        "one rank's batches are smaller": ("12 // ranks", "12 // ranks - (me == 1)"),
        "every rank has the same data": ("(train_set)\n", "(train_set, rank=0)\n"),
        "every rank reads all data": ("(train_set)\n", "(train_set, 1, 0, seed=me)\n"),
        "some test images count twice": (LOADER, TWICE),
        "all ranks test the same part": (LOADER, f"\nown = range(0, 31, ranks){LOADER}"),
        "the test's result is not added up": ("dist.all_reduce(total)", "pass"),
        "the forward pass goes through `.module`": ("ddp_model(", "ddp_model.module("),
        "an old checkpoint on one rank": ("\nschedule =", OLD),
        "a layer is unfrozen after wrapping": (f"\n{WRAP}\n", UNFREEZE),
        "the best model is chosen by a rank's own score": OWN,
        "`set_epoch` on rank 0 only": (EPOCH, f"    if me == 0:\n    {EPOCH}"),
        "no `set_epoch`": (EPOCH, ""),
        "one rank's data is shifted": ("(loader,", "([*loader][me:] + [*loader][:me],"),
        "the loss is multiplied by the world size": TIMES,
        "the loss is a sum over the batch": (FORWARD, f"{FORWARD[:-2]}, reduction='sum')\n"),
        "the loss is a weighted mean": (FORWARD, f"{FORWARD[:-2]}, torch.arange(1.0, 4))\n"),
        "the scheduler takes a step for each rank": ("schedule.step()", EACH),
        "labels of other images": ("labels[numbers]", "labels.roll(1)[numbers]"),
    },
    "dropout": {
        "only rank 0 calls `train()`": ("\nplain.train()", "\nplain.train(me == 0)"),
        "the same dropout on all ranks": ("seed + me", "seed"),
        "a test without `eval()`": ("tested.eval()", "pass"),
    },
    "buffers": {"buffers are not synchronized": ("dist.broadcast(buffer, src=0)", "pass")},
    "by hand": {
        "other first weights": ("\nplain = ", "\ntorch.manual_seed(me)\nplain = "),
        "gradients are added up, not averaged": SUM,
    },
    "by hand, Adam": {"gradients are added up, but with Adam": SUM},
    "Adam": {"the loss is multiplied, but with Adam": TIMES},
    "EMA": {"averaged weights (EMA) on rank 0 only": ("follow(", "me == 0 and follow(")},
    "rate by score": {"the rate follows a rank's own score": OWN},
    "F1": {
        "the test's F1 is averaged over the ranks": (
            "return accuracy",
            "return mean_of_ranks(correct[0] / correct[1])",
        )
    },
}


def average(plain, count):
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= count


def follow(tested, plain):
    for mean, weight in zip(tested.parameters(), plain.parameters()):
        mean.data.lerp_(weight.data, 0.5)


def f1_parts(found, right):
    return torch.stack([(found & right).sum() * 2, found.sum() + right.sum()])


def mean_of_ranks(score):
    dist.all_reduce(score)
    return score.item() / dist.get_world_size()


def changed(script, changes):
    """Return a script after changes, [(text, instead), ...], each of which fits at one place."""
    for text, instead in changes:
        assert script.count(text) == 1, f"{script.count(text)} times: {text}"
        script = script.replace(text, instead)
    return script


def read_script(page):
    """Return the whole program: the page's boxes, and what stands around them."""
    boxes = re.findall(r"^```python\n(?!def |class )(.*?)^```", page, re.M | re.S)
    start, loop, test, compare = boxes
    own, shown = (re.search(f"`({x}.*?)`", page)[1] for x in (r"range\(", r"print\(epoch"))
    more = [
        ("(1, 10)", "(1, 3)"),
        (EPOCH, f"{EPOCH}    {shown}\n"),
        ("score = test(tested)\n", "score = test(tested)\n    print('score', score)\n"),
        (STEP, f"{indent(compare, ' ' * 8)}{STEP}        schedule.step()\n"),
    ]
    loop, test = changed(loop, more), indent(test, " " * 8)
    return SCRIPT.format(start=start, loop=loop, test=test, own=own)


def main():
    page = Path(sys.argv[1]).read_text()
    checks = {}  # with the imports that the page names, and no others
    exec("\n".join(re.findall(r"`(import [^`]+)`", page)), checks)
    exec("\n".join(re.findall(r"^```python\n((?:def|class) .*?)^```", page, re.M | re.S)), checks)
    dist.init_process_group("gloo")
    script, results = read_script(page), {}
    for program, faults in FAULTS.items():
        right = changed(script, PROGRAMS[program])
        for name, change in {program: None, **faults}.items():
            says, printed = io.StringIO(), io.StringIO()
            stopped = contextlib.suppress(SystemExit)  # on every rank, or on none
            with contextlib.redirect_stderr(says), contextlib.redirect_stdout(printed), stopped:
                exec(changed(right, [change] if change else []), globals() | checks)
            results[name] = {"says": says.getvalue().strip(), "printed": printed.getvalue()}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.barrier()  # and no destroy_process_group, which can hang before torch 2.8


if __name__ == "__main__":
    main()
