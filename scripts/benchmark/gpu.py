"""The case that needs a GPU."""

import re
from functools import partial

import torch
import torch.nn.functional as F
from lib.course import load

from benchmark.commands import (
    BATCH,
    DATA,
    LESSONS,
    LeftOutError,
    images_per_second,
    run,
    seconds_of,
    speed,
)
from benchmark.layouts import load_tensors
from benchmark.usual_mnist import make_loader


def training_step(lesson, device):
    """Return a function that trains lesson 2's Net with a batch on the device: (images, labels)."""
    torch.manual_seed(0)
    model = lesson.Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images, labels):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def capture(step, images, labels):
    """Return a function that does a step as one CUDA graph: one launch for all of its kernels."""
    side = torch.cuda.Stream()  # warm-up and capture want a stream of their own
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(images, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(images, labels)
    return graph.replay


def count_launches(step, images, labels):
    """Return how many kernels a step launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(images, labels)
        torch.cuda.synchronize()
    launches = re.compile(r"(cuda|cu|hip)(Ext)?(Module)?LaunchKernel")
    return sum(x.count for x in profiler.key_averages() if launches.match(x.key))


def gpu(folder, tiny):
    """Lesson 2 on one GPU, the same Net fed by torchvision, and how fast its step could be."""
    if not torch.cuda.is_available():
        raise LeftOutError("There is no GPU here.")
    lesson, device = load(LESSONS["2"]), torch.device("cuda", 0)
    images, labels = (x[:BATCH].to(device) for x in load_tensors()[:2])
    one = torch.zeros(1, device=device)
    seconds = 0.1 if tiny else 3

    def lesson_2():
        output = run("python", LESSONS["2"], "--epochs", "4", cwd=folder, CUDA_VISIBLE_DEVICES="0")
        return {"lesson 2": speed(output)}

    def fed_by_torchvision():
        step = training_step(lesson, device)
        loader = make_loader(DATA, train=True, batch_size=BATCH)

        def trained():
            while True:
                for x, y in loader:
                    step(x[:, 0].to(device), y.to(device))  # normalised twice: no less work
                    yield x, y

        return {"the same Net, torchvision": images_per_second(trained(), device, seconds)}

    def bare():
        step = partial(training_step(lesson, device), images, labels)
        return {"step alone, no data": BATCH / seconds_of(step, device, seconds)}

    def captured():
        step = capture(training_step(lesson, device), images, labels)
        return {"step as a graph": BATCH / seconds_of(step, device, seconds)}

    def launches():
        step = training_step(lesson, device)
        step(images, labels)  # the first step allocates
        count = count_launches(step, images, labels)
        each = seconds_of(lambda: [one.add_(1) for _ in range(100)], device, 0.2) / 100
        print(f"   a step launches {count} kernels; one launch takes {each * 1e6:.1f} us")
        return {"launches x time of one": BATCH / (max(1, count) * each)}

    return [lesson_2, fed_by_torchvision, bare, captured, launches]


def limit_of_a_step(medians):
    """Return a sentence on what a step of lesson 2 waits for on this GPU."""
    gain = medians["step as a graph"] / medians["step alone, no data"]
    if gain > 2:
        limit = "the time to launch its kernels, one by one"
    else:
        limit = "the work of the GPU itself"
    return f"The limit of a step is {limit}: launched at once, it is {gain:.1f} times as fast."
