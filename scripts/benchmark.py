"""Answer two questions about the speed of the course, with numbers of this machine.

Usage: scripts/benchmark.py [mnist | ddp] [--rounds N]      without a name, both of them
  mnist   images/s of the data path: lesson 2's beside the usual way of pytorch/examples
  ddp     ms a step of two ranks that never wait for each other, that average gradients by hand
          (lesson 4), and with DDP (lesson 6); and where the difference goes: all_reduce alone, and
          waiting alone

In each round everything is measured once, in turn. The table has the median of the rounds, with the
lowest and the highest; a ratio is taken in each round. Nothing else should run on the machine.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from course.lists import ROOT, load
from course.machine import recorded
from launcher.processes import exit_with
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

DATA = ROOT / "data"
BATCH = 64  # images
SECONDS = 2  # for each measurement of images/s
STEPS = 200  # for each measurement of ms a step
RANKS = 2


def in_turn(ways, rounds):
    """Call each function of {what: function} once a round; return {what: [a number a round]}."""
    values = [[measure() for measure in ways.values()] for _ in range(1 + rounds)]
    return dict(zip(ways, zip(*values[1:])))  # the first round is a warm-up


# ---- mnist


def mnist(rounds):
    """Return {what: [images/s, each round]}.

    All ways deliver the same: 64 normalised images in random order, float32 [64, 1, 28, 28].
    """
    from torchvision import datasets, transforms

    torch.set_num_threads(1)
    train_set, _ = load("day1/2_mnist_training.py").load_mnist(DATA)
    # As pytorch/examples does it: a picture at a time becomes a tensor and is normalised.
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    usual = datasets.MNIST(DATA, train=True, transform=transforms.Compose(steps))
    ways = {"lesson 2": partial(of_lesson_2, DataLoader(train_set, BATCH, shuffle=True))}
    for workers in (0, 1):
        loader = DataLoader(usual, BATCH, shuffle=True, num_workers=workers)
        ways[f"the usual way, {workers} workers"] = loader.__iter__
    return in_turn({name: partial(speed, epoch) for name, epoch in ways.items()}, rounds)


def of_lesson_2(loader):
    """Yield the batches of an epoch as lesson 2's model gets and normalises them."""
    for images, labels in loader:
        yield (images.unsqueeze(1) / 255 - 0.1307) / 0.3081, labels


def speed(epoch):
    """Return how many images/s epoch() yields, once its first batch is there."""
    batches = itertools.chain.from_iterable(epoch() for _ in itertools.count())
    next(batches)
    images = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        images += len(next(batches)[1])
    return images / (time.perf_counter() - begin)


# ---- ddp


def ddp(rounds):
    """Return {what: [ms a step, each round]}, the mean of both ranks."""
    answers = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = Path(folder, "meeting-point")
        # If a rank fails, or this process ends, no rank goes on.
        torch.multiprocessing.spawn(measure_steps, (meeting_point, rounds, answers), RANKS)
    return answers.get()


def measure_steps(rank, meeting_point, rounds, answers):
    """Be one rank: measure steps with and without what makes ranks wait. Rank 0 answers."""
    by_hand, lesson = load("day1/4_mnist_manual_ddp.py"), load("day1/6_mnist_ddp_pt.py")
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    device, backend = lesson.choose_device(rank, RANKS)
    dist.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS
    )
    train_set, _ = lesson.load_mnist(DATA)
    model = lesson.Net().to(device)
    ddp_model = DistributedDataParallel(lesson.Net().to(device))
    gradients = torch.zeros(sum(x.numel() for x in model.parameters()), device=device)
    synchronize = torch.get_device_module(device).synchronize

    def train(lesson, model, wrap=iter):
        batches = itertools.islice(DataLoader(train_set, BATCH, shuffle=True), STEPS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        lesson.train_one_epoch(model, wrap(batches), optimizer, device)

    def send():
        for _ in range(STEPS):
            dist.all_reduce(gradients)

    def took(work, *arguments):
        synchronize()
        begin = time.perf_counter()
        work(*arguments)
        synchronize()
        return 1000 * (time.perf_counter() - begin)

    def step_of(work, *arguments):
        dist.barrier()  # both begin together
        return took(work, *arguments) / STEPS

    def waiting():
        times = []

        def then_meet(batches):
            for batch in batches:
                yield batch  # the step with it comes first
                times.append(took(dist.barrier))

        dist.barrier()
        train(lesson, model, then_meet)
        return sum(times) / STEPS

    ways = {
        "never waits": partial(step_of, train, lesson, model),
        "by hand": partial(step_of, train, by_hand, model),
        "DDP": partial(step_of, train, lesson, ddp_model),
        f"all_reduce alone, {gradients.nbytes / 1e3:.0f} kB": partial(step_of, send),
        "waiting alone, for the slower rank": waiting,
    }
    values = torch.tensor([*in_turn(ways, rounds).values()], device=device)
    dist.all_reduce(values)  # of a quick rank and a slow one, the waits differ
    if rank == 0:
        answers.put(dict(zip(ways, (values / RANKS).tolist())))
    dist.barrier()
    time.sleep(0.2)  # as the lessons do: gloo's threads may still be freeing tensors
    dist.destroy_process_group()


# ---- both

QUESTIONS = {"mnist": (mnist, "images/s"), "ddp": (ddp, "ms a step")}


def rows(name, rounds):
    """Yield the rows of the table. Each ratio is taken within a round, to the first row."""
    measure, unit = QUESTIONS[name]
    values = measure(rounds)
    first = next(iter(values.values()))
    for what, measured in values.items():
        low, middle, high = map(shown, (min(measured), statistics.median(measured), max(measured)))
        ratio = statistics.median(x / y for x, y in zip(measured, first))
        yield f"| `{name}`, {unit} | {what} | {middle} | {low} to {high} | {ratio:.2g} |"


def shown(value):
    """Return a number with three digits, or without decimals where it is larger."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main():
    """Measure what was asked for; print where and when, and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=QUESTIONS, help="without it, both")
    parser.add_argument("--rounds", type=int, default=5, help="how often (5)")
    args = parser.parse_args()
    lines = [
        row for name in QUESTIONS if args.name in (None, name) for row in rows(name, args.rounds)
    ]
    command = " ".join(["python scripts/benchmark.py", *sys.argv[1:]])
    print(recorded(command, f"median of {args.rounds} rounds"))
    print("| question | what | median | lowest to highest | against the first |")
    print("|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    exit_with(main)
