"""Measure on this machine how fast the course reads its data, and how long its steps take.

Usage: scripts/benchmark.py [mnist | ddp] [--rounds N]      without a name, both
  mnist   images/s of the data path: lesson 2's beside the usual way of pytorch/examples
  ddp     ms a step of two ranks that never wait for each other, that average gradients by hand
          (lesson 4), and with DDP (lesson 6); and where the difference goes: all_reduce alone, and
          waiting alone

In each round, everything is measured once, in turn. The table shows the median of the rounds, with
the lowest and the highest value, and ratios within a round. Run nothing else on the machine.
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

    All ways deliver the same thing: 64 normalised images in random order, float32 [64, 1, 28, 28].
    """
    from torchvision import datasets, transforms

    torch.set_num_threads(1)
    train_set, _ = load("day1/2_mnist_training.py").load_mnist()
    # As pytorch/examples does it: one picture at a time becomes a tensor and is normalised.
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    usual = datasets.MNIST(DATA, train=True, transform=transforms.Compose(steps))
    ways = {"lesson 2": partial(of_lesson_2, DataLoader(train_set, BATCH, shuffle=True))}
    for workers in (0, 1):
        loader = DataLoader(usual, BATCH, shuffle=True, num_workers=workers, timeout=60 * workers)
        ways[f"the usual way, {workers} workers"] = loader.__iter__
    return in_turn({name: partial(speed, epoch) for name, epoch in ways.items()}, rounds)


def of_lesson_2(loader):
    """Yield the batches of an epoch as lesson 2's model gets and normalises them."""
    for images, labels in loader:
        yield (images.unsqueeze(1) / 255 - 0.1307) / 0.3081, labels


def speed(epoch):
    """Return how many images/s epoch() yields, once its first batch has arrived."""
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
        # If a rank fails or this process ends, the other ranks stop, too.
        torch.multiprocessing.spawn(measure_steps, (meeting_point, rounds, answers), RANKS)
    return answers.get()


def measure_steps(rank, meeting_point, rounds, answers):
    """Be one rank, and measure together with the other. Rank 0 returns the results."""
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    steps = Steps(rank, f"file://{meeting_point}")
    ways = steps.ways()
    values = torch.tensor([*in_turn(ways, rounds).values()], device=steps.device)
    dist.all_reduce(values)  # the quicker rank waits longer
    if rank == 0:
        answers.put(dict(zip(ways, (values / RANKS).tolist())))
    dist.barrier()
    time.sleep(0.2)  # as the lessons do: gloo's threads may still be freeing tensors
    dist.destroy_process_group()


class Steps:
    """Steps of training on one rank, with and without what makes ranks wait."""

    def __init__(self, rank, meeting_point):
        self.by_hand = load("day1/4_mnist_manual_ddp.py")
        self.lesson = load("day1/6_mnist_ddp_pt.py")
        self.device, backend = self.lesson.choose_device(rank, RANKS)
        dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=RANKS)
        self.train_set, _ = self.lesson.load_mnist()
        self.model = self.lesson.Net().to(self.device)
        self.ddp_model = DistributedDataParallel(self.lesson.Net().to(self.device))
        numbers = sum(x.numel() for x in self.model.parameters())
        self.gradients = torch.zeros(numbers, device=self.device)

    def ways(self):
        """Return {what: a function that measures ms a step}."""
        return {
            "never waits": partial(self.step, self.train, self.lesson, self.model),
            "by hand": partial(self.step, self.train, self.by_hand, self.model),
            "DDP": partial(self.step, self.train, self.lesson, self.ddp_model),
            f"all_reduce alone, {self.gradients.nbytes / 1e3:.0f} kB": partial(
                self.step, self.send
            ),
            "waiting alone, for the slower rank": self.waiting,
        }

    def train(self, lesson, model, wrap=iter):
        """Train as a lesson does, with this rank's own batches."""
        batches = itertools.islice(DataLoader(self.train_set, BATCH, shuffle=True), STEPS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        lesson.train_one_epoch(model, wrap(batches), optimizer, self.device)

    def send(self):
        """Send as often as in training, and nothing else."""
        for _ in range(STEPS):
            dist.all_reduce(self.gradients)

    def step(self, work, *arguments):
        """Return how many ms each step of work takes. Both ranks begin together."""
        dist.barrier()
        return self.took(work, *arguments) / STEPS

    def waiting(self):
        """Return how many ms this rank waits for the other rank after each step."""
        times = []

        def then_meet(batches):
            for batch in batches:
                yield batch  # the step with it comes first
                times.append(self.took(dist.barrier))

        self.step(self.train, self.lesson, self.model, then_meet)
        return sum(times) / STEPS

    def took(self, work, *arguments):
        """Return how many ms work takes. On a GPU, this includes what the GPU does."""
        synchronize = torch.get_device_module(self.device).synchronize
        synchronize()
        begin = time.perf_counter()
        work(*arguments)
        synchronize()
        return 1000 * (time.perf_counter() - begin)


# ---- both

QUESTIONS = {"mnist": (mnist, "images/s"), "ddp": (ddp, "ms a step")}


def rows(name, rounds):
    """Yield the rows of the table. Each ratio compares with the first row, within a round."""
    measure, unit = QUESTIONS[name]
    values = measure(rounds)
    first = next(iter(values.values()))
    for what, measured in values.items():
        low, middle, high = map(shown, (min(measured), statistics.median(measured), max(measured)))
        ratio = statistics.median(x / y for x, y in zip(measured, first))
        yield f"| `{name}`, {unit} | {what} | {middle} | {low} to {high} | {ratio:.2g} |"


def shown(value):
    """Return a number with three digits, or without decimals if it has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main():
    """Measure one or both; print where and when, and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=QUESTIONS, help="both if not given")
    parser.add_argument("--rounds", type=int, default=5, help="how often to measure each (5)")
    args = parser.parse_args()
    names = [args.name] if args.name else QUESTIONS
    lines = [row for name in names for row in rows(name, args.rounds)]
    command = " ".join(["python scripts/benchmark.py", *sys.argv[1:]])
    print(recorded(command, f"median of {args.rounds} rounds"))
    print("| question | what | median | lowest to highest | against the first |")
    print("|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    exit_with(main)
