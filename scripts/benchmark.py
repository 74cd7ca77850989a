"""Answer what people ask about the speed of the course, with numbers of this machine.

Usage: scripts/benchmark.py [NAME]... [--rounds N]      all of them take a few minutes
  mnist      images/s of the data path: lesson 2's beside the usual way of pytorch/examples
  ddp        ms a step of two ranks: DDP (lesson 6) beside ranks that never wait, and where the rest
             goes: all_reduce alone, and waiting alone
  streaming  images/s of lesson 11: from the file, and from memory
  memory     MB that reading a file takes: in chunks as lesson 11 does, and as a whole

In each round everything is measured once, in turn. The table has the median of the rounds, with the
lowest and the highest; a ratio is taken in each round. Nothing else should run on the machine.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from course.lists import LAUNCHER, ROOT, load
from course.machine import recorded
from launcher import processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

DATA = ROOT / "data"
CREATE = "day2/create_mnist_h5.py"
STREAMING = "day2/11_mnist_ddp_pt_multinode_streaming.py"
BATCH = 64  # images
RANKS = 2


# ---- mnist


def mnist(folder):
    """Return {what: a function that measures images/s} of batches, ready for a model.

    All deliver the same: 64 normalised images in random order, float32 [64, 1, 28, 28].
    """
    from torchvision import datasets, transforms

    lesson = load("day1/2_mnist_training.py")
    train_set, _ = lesson.load_mnist(DATA)
    # As pytorch/examples does it: a picture at a time becomes a tensor and is normalised.
    to_tensor = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    usual = datasets.MNIST(DATA, train=True, transform=to_tensor)
    ways = {"lesson 2": partial(of_lesson_2, DataLoader(train_set, BATCH, shuffle=True))}
    for workers in (0, 1):
        loader = DataLoader(usual, BATCH, shuffle=True, num_workers=workers)
        ways[f"the usual way, {workers} workers"] = loader.__iter__
    return {name: partial(images_per_second, epoch) for name, epoch in ways.items()}


def of_lesson_2(loader):
    """Yield the batches of an epoch as lesson 2's model gets and normalises them."""
    for images, labels in loader:
        yield (images.unsqueeze(1) / 255 - 0.1307) / 0.3081, labels


def images_per_second(epoch, seconds=2):
    """Return how many images/s epoch() yields, after a warm-up."""
    torch.set_num_threads(1)
    batches = itertools.chain.from_iterable(epoch() for _ in itertools.count())
    for _ in range(10):
        next(batches)
    images = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += len(next(batches)[1])
    return images / (time.perf_counter() - begin)


# ---- ddp


def ddp(folder):
    """Return {what: a function that measures ms a step}. One job measures all, with both ranks."""
    return {"": partial(ask_ranks, folder)}


def ask_ranks(folder):
    """Start two ranks; return {what: ms a step} as rank 0 measures it."""
    meeting_point = Path(folder, "meeting-point")
    meeting_point.unlink(missing_ok=True)
    answers = get_context("spawn").SimpleQueue()
    # If a rank fails, or this process ends, no rank goes on.
    torch.multiprocessing.spawn(measure_steps, (meeting_point, answers), RANKS)
    return answers.get()


def measure_steps(rank, meeting_point, answers, steps=200):
    """Measure, as one rank, steps of lesson 6 with and without what makes ranks wait."""
    lesson = load("day1/6_mnist_ddp_pt.py")
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    device, backend = lesson.choose_device(rank, RANKS)
    dist.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS
    )
    train_set, _ = lesson.load_mnist(DATA)
    model = lesson.Net().to(device)
    ddp_model = DistributedDataParallel(lesson.Net().to(device))
    gradients = torch.zeros(sum(x.numel() for x in model.parameters()), device=device)
    number = torch.zeros(1, device=device)

    def train(model, with_wait=False):
        batches = itertools.islice(DataLoader(train_set, BATCH, shuffle=True), steps)
        if with_wait:
            batches = then_send(batches, number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        lesson.train_one_epoch(model, batches, optimizer, device)

    def send(tensor):
        for _ in range(steps):
            dist.all_reduce(tensor)

    ways = {
        "never waits": partial(train, model),
        "waits for the other: also sends one number": partial(train, model, with_wait=True),
        "DDP": partial(train, ddp_model),
        f"all_reduce alone, {gradients.nbytes / 1e3:.0f} kB": partial(send, gradients),
        "all_reduce alone, one number": partial(send, number),
    }
    for _ in range(2):  # the first time is the warm-up
        times = {name: ms_of(work, device) / steps for name, work in ways.items()}
    if rank == 0:
        answers.put(times)
    dist.barrier()
    time.sleep(0.2)  # as the lessons do: gloo's threads may still be freeing tensors
    dist.destroy_process_group()


def then_send(batches, number):
    """Yield batches. After the step with each, send a number: ranks wait for the slower one."""
    for batch in batches:
        yield batch
        dist.all_reduce(number)


def ms_of(work, device):
    """Return how many ms work() takes. All ranks begin together."""
    dist.barrier()
    torch.get_device_module(device).synchronize()
    begin = time.perf_counter()
    work()
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) * 1000


# ---- streaming


def streaming(folder):
    """Return {what: a function that measures images/s}: lesson 11 measures both in one run."""
    file = Path(folder, "mnist.h5")
    run(sys.executable, ROOT / CREATE, "--file", file)
    return {"": partial(epochs_of_lesson_11, file)}


def epochs_of_lesson_11(file):
    """Train with two ranks from the file, then from memory; return {what: images/s}."""
    where = ("--local", f"1x{RANKS}")
    output = run(ROOT / LAUNCHER, *where, ROOT / STREAMING, "--file", file, "--epochs", 3)
    parts = output.partition("now the same batches from memory")
    return {"from memory": speed(parts[2]), "from the file": speed(parts[0])}


def speed(output):
    """Return the median images/s of the epochs; the first has the warm-up in it."""
    speeds = re.findall(r"^epoch [1-9].* ([\d,]+) images/s$", output, re.MULTILINE)
    return statistics.median(float(x.replace(",", "")) for x in speeds)


def run(*command):
    """Run a command of the course; return its output, or exit with its last line if it fails."""
    environment = {**os.environ, "PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        job = processes.run(command, 600, cwd=folder, env=environment, stderr=subprocess.STDOUT)
    if job.trouble:
        last = job.output.strip().rpartition("\n")[2]
        sys.exit(f"{Path(command[1]).name}: {job.trouble}. {last}")
    return job.output


# ---- memory


def memory(folder):
    """Return {what: a function that measures MB}, for files of 1, 5 and 20 times MNIST."""
    if not Path("/proc/self/status").exists():
        sys.exit("Only Linux says how much memory a process has held: leave out memory.")
    ways = {}
    for copies in (1, 5, 20):
        file = Path(folder, f"mnist{copies}.h5")
        run(sys.executable, ROOT / CREATE, "--file", file, "--copies", copies)
        size = f"{file.stat().st_size / 1e6:.0f} MB"
        ways[f"in chunks, file of {size}"] = partial(ask_child, read_in_chunks, file)
        ways[f"as a whole, file of {size}"] = partial(ask_child, read_as_a_whole, file)
    return ways


def ask_child(read, file):
    """Return the most memory, in MB, that a new process has held after read(file)."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_memory, (read, file))


def peak_memory(read, file):
    """Read a file in this process; return the most memory that it has held, in MB."""
    read(file)
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1e3


def read_in_chunks(file):
    """Read a file to its end as a rank of lesson 11 does, without a worker."""
    args = argparse.Namespace(
        file=file, batch_size=BATCH, max_steps=None, seed=0, shuffle=True, buffer=8
    )
    for _ in load(STREAMING).ChunkStream(0, 1, args):
        pass


def read_as_a_whole(file):
    """Read all images of a file into memory."""
    import h5py

    with h5py.File(file) as data:
        torch.from_numpy(data["images"][:])


# ---- all of them

QUESTIONS = {
    "mnist": (mnist, "images/s"),
    "ddp": (ddp, "ms a step"),
    "streaming": (streaming, "images/s"),
    "memory": (memory, "MB"),
}


def measure(prepare, rounds):
    """Return {what: [a value for each round]}."""
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = prepare(folder)
        for number in range(rounds):
            print(f"{prepare.__name__}: round {number + 1} of {rounds}", file=sys.stderr)
            for name, work in ways.items():
                result = work()
                several = result if isinstance(result, dict) else {name: result}
                for what, value in several.items():
                    values.setdefault(what, []).append(value)
    return values


def rows(name, values):
    """Yield the rows of the table. Each ratio is taken within a round, to the first row."""
    unit = QUESTIONS[name][1]
    first = next(iter(values.values()))
    for what, measured in values.items():
        ratio = statistics.median(x / y for x, y in zip(measured, first))
        spread = f"{shown(min(measured))} to {shown(max(measured))}"
        middle = shown(statistics.median(measured))
        yield f"| `{name}`, {unit} | {what} | {middle} | {spread} | {ratio:.2g} |"


def shown(value):
    """Return a number with three digits, or without decimals where it is larger."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help=f"of {', '.join(QUESTIONS)}; without any, all")
    parser.add_argument("--rounds", type=int, default=5, help="how often (5)")
    args = parser.parse_args()
    for name in args.name:
        if name not in QUESTIONS:
            parser.error(f"There is nothing called {name!r}. There are {', '.join(QUESTIONS)}.")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {args.rounds}")
    return args


def main():
    """Measure what was asked for; then print where and when, and the table."""
    args = parse_args()
    lines = []
    for name in args.name or QUESTIONS:
        lines += rows(name, measure(QUESTIONS[name][0], args.rounds))
    command = " ".join(["python scripts/benchmark.py", *sys.argv[1:]])
    print(recorded(command, f"median of {args.rounds} rounds"))
    print("| question | what | median | lowest to highest | against the first |")
    print("|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    processes.exit_with(main)
