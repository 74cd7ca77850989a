"""Draw the figures of the slides, as SVG files beside this one.

Curves and times are drawn from data/*.json, recorded from real runs; each file says when, where
and by which command. The other figures explain an idea and show nothing measured.

Usage: slides/figures/draw.py            draw all figures
       slides/figures/draw.py --check    change nothing; exit status 1 if a figure is stale
       slides/figures/draw.py --record   run lessons 2, 6, 7 and 8 first and write data/*.json
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Colours that colour-blind people can tell apart (Okabe and Ito), one a rank.
RANKS = ["#0072B2", "#C24E00", "#007A59", "#8F4A86"]
INK, GREY, PALE, YELLOW = "#16191d", "#4a5058", "#eef1f4", "#ffe08a"
COMPUTE, SEND = "#9cc9e8", "#f2b48c"
SIZE = 18  # points; 72 of them are 100 pixels on a slide that is 1280 wide
SMALL = 15


# Recording


def run(*command, cwd):
    """Run a command of this repository in the folder cwd and return what it prints."""
    print("$", *command, flush=True)
    program = [sys.executable if command[0] == "python" else command[0]]
    arguments = [str(ROOT / x) if x.startswith("day") else x for x in command[1:]]
    done = subprocess.run([*program, *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def read_events(folder):
    """Return the curve that a lesson wrote for TensorBoard: [[images seen, loss], ...]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [[event.step, round(event.value, 4)] for event in events.Scalars("loss/train")]


def write(name, command, **data):
    """Write data/NAME.json with what is needed to tell where the data comes from."""
    import torch

    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} CPU cores, {gpus or 'no'} GPU{'s' * (gpus > 1)}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
        },
        "command": command,
    }
    text = json.dumps(facts | data)
    (HERE / "data" / f"{name}.json").write_text(text.replace("], [", "],\n[") + "\n")


def record_curve(name, file, *groups):
    """Run a lesson once; record the curve in its folder of runs/, or those of the groups there."""
    command = ("python", f"day1/{file}.py")
    with tempfile.TemporaryDirectory() as folder:
        output = run(*command, cwd=folder)
        runs = Path(folder, "runs", file)
        curves = {group: read_events(runs / group) for group in groups or [""]}
    proof = next(line for line in output.splitlines() if line.startswith("=>"))
    rates = dict(re.findall(r"^(\w+): .* learning rate ([\d.]+),", output, re.MULTILINE))
    write(name, " ".join(command), proof=proof, rates=rates, curves=curves)


def record_speed():
    """Run lesson 7 three times for each number of processes; record the images/s that it prints."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2, 4) * 3:
            command = ("python", "day1/7_mnist_ddp_pt_timing.py", str(processes))
            output = run(*command, cwd=folder)
            speeds = re.findall(r"^processes: (\d+), .* ([\d,]+) images/s$", output, re.M)
            rows.append([[int(n), int(speed.replace(",", ""))] for n, speed in speeds])
    write("lesson7", "python day1/7_mnist_ddp_pt_timing.py N, with N = 1, 2, 4, 3 times", runs=rows)


def record_sampler():
    """Record which of 16 images DistributedSampler gives to each of 4 ranks, in two epochs."""
    from torch.utils.data import DistributedSampler

    epochs = []
    for epoch in (0, 1):
        samplers = [DistributedSampler(range(16), 4, rank, seed=0) for rank in range(4)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in samplers])
    write("sampler", "DistributedSampler(range(16), 4, rank, seed=0)", epochs=epochs)


def record():
    """Run what the figures show and write data/*.json."""
    record_sampler()
    record_curve("lesson2", "2_mnist_training")
    record_curve("lesson6", "6_mnist_ddp_pt")
    record_curve("lesson8", "8_mnist_ddp_pt_lr", "alone", "unscaled", "linear")
    record_speed()


def read(name):
    """Return the recorded data, and one line on where they come from."""
    data = json.loads((HERE / "data" / f"{name}.json").read_text())
    return data, f"{data['date']}, {data['hardware']}, torch {data['versions']['torch']}"


# Drawing


def sheet(height=5.0, width=11.6):
    """Return axes that fill a figure of this size; one unit is one inch, or 100 pixels."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes, x, y, width, height, label="", color=PALE, ink=None, size=SIZE, **options):
    """Draw a box with its lower left corner at x, y, and a label in the middle."""
    ink = ink or ("white" if color in RANKS else INK)
    shape = "round,pad=0,rounding_size=0.08"
    options = {"ec": "none", "lw": 1.5} | options
    weight = options.pop("weight", "normal")
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=color, **options))
    say(axes, x + width / 2, y + height / 2, label, size, ink, weight=weight)


def say(axes, x, y, text, size=SIZE, color=INK, ha="center", va="center", **options):
    axes.text(x, y, text, size=size, color=color, ha=ha, va=va, linespacing=1.3, **options)


def arrow(axes, begin, end, color=INK, style="-|>", **options):
    options = {"lw": 2.2, "mutation_scale": 20, "shrinkA": 0, "shrinkB": 0} | options
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle=style, color=color, **options))


def processes():
    """Four processes on one node, and a sum."""
    axes = sheet(4.8)
    box(axes, 0.1, 0.15, 11.4, 4.55, color="white", ec=GREY)
    say(axes, 0.4, 4.38, "one node: one machine", SMALL, GREY, "left")
    for rank, color in enumerate(RANKS):
        x = 0.5 + rank * 2.75
        box(axes, x, 2.75, 2.35, 1.3, f"rank {rank}\na process", color)
        say(axes, x + 1.17, 2.42, f"holds {rank}", SIZE)
        arrow(axes, (x + 1.17, 2.2), (x + 1.17, 1.78))
        arrow(axes, (x + 1.17, 1.12), (x + 1.17, 0.72))
        say(axes, x + 1.17, 0.48, "holds 6", SIZE, weight="bold")
    box(axes, 0.5, 1.15, 10.6, 0.6, "all_reduce: 0 + 1 + 2 + 3 = 6", YELLOW)
    return axes


def ring():
    """All-reduce in a ring, computed step by step: 4 ranks, a tensor of 4 parts."""
    axes = sheet(5.0)
    n, cell = 4, 0.33
    # parts[rank][part]: the numbers that are already added up there. Rank 0 begins with 1.
    parts = [[{rank + 1} for _ in range(n)] for rank in range(n)]
    states, arrived = [[[set(p) for p in row] for row in parts]], [set()]
    for step in range(2 * (n - 1)):
        sent = []
        for rank in range(n):
            part = (rank - step) % n if step < n - 1 else (rank + 1 - (step - n + 1)) % n
            sent.append(((rank + 1) % n, part, set(parts[rank][part])))
        for rank, part, value in sent:
            parts[rank][part] = parts[rank][part] | value if step < n - 1 else value
        states.append([[set(p) for p in row] for row in parts])
        arrived.append({(rank, part) for rank, part, _ in sent})
    assert all(len(p) == n for row in parts for p in row)
    for column, (state, new) in enumerate(zip(states, arrived)):
        x = 1.05 + column * 1.51
        say(axes, x + 2 * cell, 3.92, "start" if column == 0 else f"step {column}", SMALL, GREY)
        for rank in range(n):
            y = 3.2 - rank * 0.83
            if column == 0:
                say(axes, 0.9, y + 0.22, f"rank {rank}", SMALL, RANKS[rank], "right", weight="bold")
            for part in range(n):
                done = len(state[rank][part]) == n
                color = "#bfe6d2" if done else YELLOW if (rank, part) in new else "white"
                patch = Rectangle((x + part * cell, y), cell, 0.45, fc=color, ec=GREY, lw=1)
                axes.add_patch(patch)
                axes.text(
                    x + (part + 0.5) * cell, y + 0.21, sum(state[rank][part]), size=15,
                    ha="center", va="center", color=INK, 
                )  # fmt: skip
    first, last = 1.05 + 1.51, 1.05 + 4 * 1.51
    for x, words in ((first, "add up what arrives"), (last, "pass the sums on")):
        axes.plot([x, x + 2 * 1.51 + n * cell], [4.2, 4.2], color=INK, lw=2)
        say(axes, x + 1.51 + 2 * cell, 4.52, words, SIZE)
    say(
        axes, 5.8, 0.2,
        "In each step every rank sends a quarter of its tensor to the next rank; rank 3 to rank 0.",
        SMALL,
    )  # fmt: skip
    return axes


def identical():
    """Lesson 3's identical processes beside lesson 4's data parallel ones."""
    axes = sheet(4.9)
    for left, title in ((0.0, "lesson 3: identical"), (6.1, "lesson 4: data parallel")):
        say(axes, left + 2.75, 4.5, title, 20, va="baseline", weight="bold")
        for rank, color in enumerate(RANKS):
            y = 3.45 - rank * 0.8
            say(axes, left + 0.95, y + 0.27, f"rank {rank}", SMALL, color, "right", weight="bold")
            axes.add_patch(Rectangle((left + 1.1, y), 4.2, 0.54, fc=PALE, ec=GREY, lw=1))
            if left == 0:
                axes.add_patch(Rectangle((left + 1.1, y), 4.2, 0.54, fc=color, ec="none"))
                say(axes, left + 3.2, y + 0.26, "60,000 images", SMALL, "white")
                continue
            for i in range(rank, 24, 4):  # dealt out like cards
                stripe = Rectangle((left + 1.1 + i * 4.2 / 24, y), 4.2 / 24, 0.54, fc=color)
                axes.add_patch(stripe)
    say(axes, 2.75, 0.52, "240,000 images an epoch\nthe same model, four times")
    say(axes, 8.85, 0.52, "15,000 images a rank, 60,000 an epoch\none model")
    axes.plot([5.75, 5.75], [0.2, 4.8], color="#b8bec6", lw=1.5)
    return axes


def data_parallel():
    """One step of data parallel training."""
    axes = sheet(4.7)
    stages = [("own batch", 1.25, 1.6), ("forward", 3.1, 1.5), ("backward", 4.85, 1.5)]
    for rank, color in enumerate(RANKS):
        y = 3.35 - rank * 0.95
        say(axes, 1.05, y + 0.33, f"rank {rank}", SMALL, color, "right", weight="bold")
        for name, x, width in stages:
            box(axes, x, y, width, 0.66, name, color, size=16)
        arrow(axes, (6.4, y + 0.33), (6.8, y + 0.33))
        arrow(axes, (8.7, y + 0.33), (9.1, y + 0.33))
        box(axes, 9.15, y, 2.35, 0.66, "step", color, size=16)
    box(axes, 6.85, 0.5, 1.8, 3.51, "all_reduce:\nmean of the\ngradients", YELLOW)
    say(axes, 5.6, 4.36, "other images,\nother gradients", SMALL, GREY)
    say(axes, 10.3, 4.36, "same gradients,\nsame weights", SMALL, GREY)
    return axes


def sampler():
    """What DistributedSampler deals out."""
    data, _ = read("sampler")
    axes = sheet(4.6)
    for epoch, ranks in enumerate(data["epochs"]):
        y = 3.35 - epoch * 1.05
        say(axes, 1.35, y + 0.3, f"epoch {epoch}", SIZE, ha="right")
        row = [ranks[i % 4][i // 4] for i in range(16)]
        for i, image in enumerate(row):
            box(axes, 1.55 + i * 0.625, y, 0.58, 0.6, str(image), RANKS[i % 4], size=17)
    say(axes, 6.55, 4.3, "16 images, shuffled alike on every rank, then dealt out like cards", SIZE)
    for rank, images in enumerate(data["epochs"][0]):
        x = 0.45 + rank * 2.8
        numbers = ", ".join(map(str, images))
        box(axes, x, 0.25, 2.55, 1.2, f"rank {rank}, epoch 0\n{numbers}", RANKS[rank], size=17)
    return axes


def buckets():
    """When gradients are sent: lesson 4 by hand, lesson 6 with buckets."""
    axes = sheet(5.0)

    def row(y, name, blocks):
        say(axes, 1.6, y + 0.3, name, SMALL, GREY, "right")
        for x, width, label, color in blocks:
            box(axes, x, y, width, 0.6, label, color, size=16)

    backward = [(3.55 + i * 1.0, 0.95, f"layer {layer}", COMPUTE) for i, layer in enumerate("4321")]
    forward = (1.75, 1.7, "forward", COMPUTE)
    title = {"size": SIZE, "ha": "left", "weight": "bold"}
    say(axes, 0.1, 4.75, "By hand (lesson 4)", **title)
    row(3.95, "compute", [forward, *backward, (10.05, 0.9, "step", COMPUTE)])
    row(3.2, "send", [(7.55, 2.4, "all gradients", SEND)])
    axes.axhline(2.85, color="#b8bec6", lw=1.5)
    say(
        axes,
        0.1,
        2.5,
        "DistributedDataParallel, two buckets",
        SIZE,
        ha="left",
        weight="bold",
    )
    row(1.7, "compute", [forward, *backward, (8.85, 0.9, "step", COMPUTE)])
    row(0.95, "send", [(5.6, 1.3, "bucket 1", SEND), (7.55, 1.2, "bucket 2", SEND)])
    for x in (5.55, 7.55):
        arrow(axes, (x, 1.68), (x, 1.3), lw=1.8, mutation_scale=14)
    arrow(axes, (11.0, 2.0), (9.8, 2.0), color=RANKS[2])
    say(axes, 10.45, 2.4, "done sooner", SMALL, RANKS[2])
    arrow(axes, (1.75, 0.55), (11.2, 0.55), color=GREY, lw=1.5)
    say(axes, 6.5, 0.25, "time (a sketch: the lengths are not measured)", SMALL, GREY)
    return axes


def nodes():
    """Two nodes with four ranks each."""
    axes = sheet(4.7)
    for node in (0, 1):
        left = 0.1 + node * 5.9
        box(axes, left, 1.15, 5.5, 3.4, color="white", ec=GREY)
        say(axes, left + 2.75, 4.2, f"node {node}", SIZE, weight="bold")
        for local in range(4):
            rank = node * 4 + local
            x = left + 0.2 + local * 1.29
            box(axes, x, 2.35, 1.22, 1.5, f"rank\n{rank}", RANKS[local], size=20)
            say(axes, x + 0.61, 1.85, "local rank", 14, GREY)
            say(axes, x + 0.61, 1.5, str(local), SIZE)
        arrow(axes, (left + 2.75, 1.12), (left + 2.75, 0.78), style="<|-|>")
    box(axes, 0.1, 0.15, 11.4, 0.6, "network between the nodes: slower than inside one", YELLOW)
    return axes


def launchers():
    """Who starts the ranks: srun, or torchrun."""
    axes = sheet(4.9)
    for left, title in ((0.1, "srun"), (5.95, "srun, then torchrun")):
        say(axes, left + 2.75, 4.5, title, 20, va="baseline", weight="bold")
        box(axes, left + 1.75, 3.65, 2.0, 0.6, "srun", YELLOW)
        for node in (0, 1):
            x = left + node * 2.85
            box(axes, x, 0.15, 2.65, 2.8, color="white", ec=GREY)
            say(axes, x + 1.32, 0.42, f"node {node}", SMALL, GREY)
            middle, ranks = x + 1.32, [x + 0.1 + local * 0.63 for local in range(4)]
            if left > 1:
                arrow(axes, (left + 2.75, 3.62), (middle, 2.82), lw=1.6)
                box(axes, x + 0.4, 2.2, 1.85, 0.6, "torchrun", SEND, size=17)
            for local, begin in enumerate(ranks):
                start = (left + 2.75, 3.62) if left < 1 else (middle, 2.18)
                arrow(axes, start, (begin + 0.28, 1.43), lw=1.4, mutation_scale=13)
                box(axes, begin, 0.75, 0.57, 0.65, str(node * 4 + local), RANKS[local], size=20)
    return axes


def groups():
    """The process groups of lesson 9: one in each node, one with a rank of every node."""
    axes = sheet(4.7)
    for node in (0, 1):
        left = 0.1 + node * 6.0
        box(axes, left, 0.75, 5.4, 3.8, color="white", ec=GREY)
        say(axes, left + 2.7, 4.2, f"node {node}", SIZE, weight="bold")
        ink = "#0072B2"
        box(axes, left + 0.2, 1.05, 5.0, 1.35, color="none", ec=ink, lw=4)
        for local in range(4):
            rank = node * 4 + local
            box(axes, left + 0.45 + local * 1.17, 1.3, 1.0, 0.85, str(rank), "#dfe5ea", size=22)
        say(axes, left + 2.7, 0.37, f"within node {node}", SIZE, ink, weight="bold")
    color = "#C24E00"
    axes.plot([1.05, 1.05, 7.05, 7.05], [2.2, 3.3, 3.3, 2.2], color=color, lw=5)
    say(axes, 3.2, 3.65, "between nodes: 0 and 4", SIZE, color, weight="bold")
    return axes


def chunks():
    """An HDF5 file in chunks: who wants one image reads the whole chunk."""
    axes = sheet(4.6)
    box(axes, 0.1, 0.2, 11.4, 4.2, color="white", ec=GREY)
    say(axes, 0.4, 4.08, "mnist.h5", SIZE, ha="left", weight="bold")
    say(axes, 0.4, 3.3, "images", SIZE, ha="left")
    labels = ["0", "1", "2", "3", "...", "233", "234"]
    wanted = 2
    for i, label in enumerate(labels):
        x = 1.9 + i * 1.34
        width = 1.24 if label != "234" else 0.64
        color = YELLOW if i == wanted else "white" if label == "..." else "#cfe3f1"
        box(axes, x, 2.9, width, 0.8, label, color, size=19)
    say(axes, 0.4, 2.0, "chunk 2", SIZE, ha="left")
    for i in range(16):
        color = RANKS[1] if i == 9 else YELLOW
        box(axes, 1.9 + i * 0.57, 1.65, 0.5, 0.7, color=color)
    left = 1.9 + wanted * 1.34
    axes.plot([left, 1.9], [2.88, 2.38], color=GREY, lw=1.5)
    axes.plot([left + 1.24, 1.9 + 15 * 0.57 + 0.5], [2.88, 2.38], color=GREY, lw=1.5)
    arrow(axes, (1.9 + 9 * 0.57 + 0.25, 1.2), (1.9 + 9 * 0.57 + 0.25, 1.6), RANKS[1])
    say(axes, 6.4, 0.85, "one image is wanted: all 256 of its chunk are read", SIZE)
    say(axes, 6.4, 0.48, "235 chunks of 256 images; the last one holds 96", SMALL, GREY)
    return axes


def streaming():
    """Chunks in a new order, shared out to ranks and their workers."""
    order = [11, 4, 14, 0, 9, 6, 2, 13, 7, 15, 1, 10, 5, 12, 3, 8]
    axes = sheet(4.9)
    say(axes, 0.1, 4.65, "the chunks of the file, in the new order of this epoch", SIZE, ha="left")
    for i, chunk in enumerate(order):
        box(axes, 0.1 + i * 0.72, 3.65, 0.66, 0.66, str(chunk), RANKS[i // 4], size=19)
    for rank, color in enumerate(RANKS):
        left = 0.1 + rank * 2.88
        box(axes, left, 0.2, 2.76, 2.95, color="white", ec=color, lw=2.5)
        say(axes, left + 1.38, 2.83, f"rank {rank}", SIZE, color, weight="bold")
        arrow(axes, (left + 1.38, 3.62), (left + 1.38, 3.18), color)
        for worker in (0, 1):
            x = left + 0.14 + worker * 1.26
            mine = order[rank * 4 + worker * 2 :][:2]
            box(axes, x, 0.4, 1.2, 2.05, color=PALE)
            say(axes, x + 0.6, 2.15, f"worker {worker}", 14)
            for i, chunk in enumerate(mine):
                box(axes, x + 0.23, 1.3 - i * 0.75, 0.74, 0.62, str(chunk), color, size=19)
    return axes


def slurm():
    """From the login node to ranks on compute nodes."""
    axes = sheet(4.4)
    box(axes, 0.1, 1.2, 2.5, 2.0, "login node\n\nyou type here")
    box(axes, 4.1, 1.2, 2.2, 2.0, "queue\n\nyou wait", YELLOW)
    arrow(axes, (2.65, 2.2), (4.05, 2.2))
    say(axes, 3.35, 2.5, "salloc", SMALL)
    say(axes, 7.25, 2.5, "granted", SMALL)
    arrow(axes, (6.35, 2.2), (8.05, 2.2))
    box(axes, 8.1, 0.3, 3.4, 3.95, color="white", ec=GREY)
    say(axes, 9.8, 3.98, "your allocation", SMALL, GREY)
    for node in (0, 1):
        y = 2.15 - node * 1.6
        box(axes, 8.3, y, 3.0, 1.45)
        say(axes, 9.8, y + 1.2, f"node {node}", SMALL)
        for local in range(4):
            label = str(node * 4 + local)
            box(axes, 8.42 + local * 0.71, y + 0.2, 0.63, 0.68, label, RANKS[local], size=19)
    say(axes, 4.3, 0.55, "srun starts a process for each task, on the nodes", SIZE)
    return axes


def restart():
    """Steps, snapshots, a failure, and the second start of lesson 12."""
    axes = sheet(4.6)
    left, step = 1.9, 0.055  # where step 0 is; inches a step

    def row(y, name, begin, end, color):
        say(axes, 1.7, y + 0.35, name, SIZE, ha="right")
        box(axes, left + begin * step, y, (end - begin) * step, 0.7, "", color)

    row(3.2, "start 1", 0, 100, RANKS[0])
    row(1.7, "start 2", 50, 170, RANKS[2])
    axes.add_patch(Rectangle((left + 50 * step, 3.2), 50 * step, 0.7, fc=SEND, ec="none"))
    say(axes, left + 25 * step, 3.55, "steps 1 to 50", SMALL, "white")
    say(axes, left + 75 * step, 3.55, "51 to 100: lost", SMALL)
    say(axes, left + 75 * step, 2.05, "51 to 100 again", SMALL, "white")
    for at in (50, 100, 150):
        y = 3.2 if at == 50 else 1.7
        axes.plot([left + at * step] * 2, [y - 0.12, y + 0.82], color=INK, lw=4)
        above = y + 1.02 if at == 50 else y - 0.35
        say(axes, left + at * step, above, "snapshot", SMALL)
    say(axes, left + 100 * step + 0.15, 3.55, "a rank fails: all are ended", SIZE, RANKS[1], "left")
    arrow(axes, (left + 50 * step, 3.05), (left + 50 * step, 2.45))
    say(axes, left + 50 * step + 0.12, 2.75, "loads it", SMALL, ha="left")
    arrow(axes, (left + 170 * step, 2.05), (left + 174 * step + 0.1, 2.05), RANKS[2])
    say(axes, 5.8, 0.55, "The second start takes the steps that the first would have taken.", SIZE)
    return axes


def shards():
    """Ratings dealt out to files, then shuffled in each."""
    axes, order = sheet(3.6), [3, 0, 2, 1]
    say(axes, 0.1, 3.3, "ratings, as they come", SMALL, GREY, "left")
    say(axes, 4.5, 3.3, "1. dealt out like cards", SMALL, GREY, "left")
    say(axes, 8.6, 3.3, "2. shuffled in each file", SMALL, GREY, "left")
    for i in range(16):
        x, y = 0.1 + i % 4 * 0.66, 2.35 - i // 4 * 0.72
        box(axes, x, y, 0.6, 0.6, str(i), RANKS[i // 4], size=17)
    for file in range(4):
        y = 2.35 - file * 0.72
        say(axes, 4.4, y + 0.3, f"file {file}", SMALL, GREY, "right")
        for place in range(4):
            number = place * 4 + file
            box(axes, 4.5 + place * 0.66, y, 0.6, 0.6, str(number), RANKS[place], size=17)
            number = order[(place + file) % 4] * 4 + file
            box(axes, 8.6 + place * 0.66, y, 0.6, 0.6, str(number), RANKS[number // 4], size=17)
    arrow(axes, (2.85, 1.6), (3.6, 1.6))
    arrow(axes, (7.35, 1.6), (8.4, 1.6))
    return axes


def sharded():
    """What a rank holds of the model between the steps: with DDP all, with FSDP a part."""
    axes, unit = sheet(4.9), 0.95  # inches high for 4 bytes a parameter
    parts = [("Adam's states", 2, "#bfe6d2"), ("gradients", 1, SEND), ("parameters", 1, COMPUTE)]
    for left, title, share in ((0.1, "DDP", 1), (6.0, "fully_shard, 4 ranks", 4)):
        say(axes, left + 2.7, 4.55, title, 20, va="baseline", weight="bold")
        for rank in range(4):
            x, y = left + rank * 1.38, 0.62
            say(axes, x + 0.64, 0.3, f"rank {rank}", SMALL)
            if share > 1:  # what the other ranks hold
                box(axes, x, y, 1.28, 4 * unit - 0.03, color="white", ec="#c9d0d8", ls="--")
            # From below: parameters, gradients, states, each as high as it has bytes.
            for name, size, color in reversed(parts):
                height = size * unit / share
                axes.add_patch(Rectangle((x, y), 1.28, height, fc=color, ec="white", lw=1.5))
                if share == 1:
                    label = f"{name}\n{4 * size} bytes".replace("Adam's ", "Adam's\n")
                    say(axes, x + 0.64, y + height / 2, label, 13)
                y += height
    background = {"fc": "white", "ec": "none"}
    say(axes, 8.7, 2.9, "16 / 4 = 4 bytes a parameter", SIZE, bbox=background)
    return axes


def plot(title=""):
    """Return axes for a chart, with large letters."""
    figure = Figure(figsize=(11.6, 5.0))
    axes = figure.add_axes((0.1, 0.24, 0.86, 0.72))
    axes.tick_params(labelsize=SIZE, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d5dae0")
    axes.set_axisbelow(True)
    return axes


def source(axes, text):
    axes.figure.text(0.985, 0.025, text, size=SMALL, color=GREY, ha="right")


def smooth(points, groups=60):
    """Return images seen and mean loss, each over an equal part of the curve."""
    bounds = [round(i * len(points) / groups) for i in range(groups + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    xs = [part[-1][0] for part in parts]
    return xs, [sum(loss for _, loss in part) / len(part) for part in parts]


def curves(named, where):
    """Draw loss curves {label: (points, colour)} over the images seen."""
    axes = plot()
    for label, (points, color) in named.items():
        axes.semilogy(*smooth(points), color=color, lw=3.5, label=label)
    axes.set_xlabel("images seen", size=SIZE)
    axes.set_ylabel("training loss", size=SIZE)
    last = max(points[-1][0] for points, _ in named.values())
    axes.set_xlim(0, 1.01 * last)
    axes.set_xticks(range(0, last + 1, last // 6))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_yticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.legend(fontsize=SIZE, frameon=False)
    source(axes, where)
    return axes


def loss_2():
    """The loss curve of lesson 2."""
    data, where = read("lesson2")
    axes = plot()
    points = data["curves"][""]
    axes.semilogy(*zip(*points), color="#b9d4e6", lw=1, label="each batch of 64")
    axes.semilogy(*smooth(points), color=RANKS[0], lw=3.5, label="mean of about 31 batches")
    axes.set_xlabel("images seen", size=SIZE)
    axes.set_ylabel("training loss", size=SIZE)
    axes.set_xlim(0, 121_000)
    axes.set_xticks(range(0, 120_001, 20_000))
    axes.set_ylim(0.01, 3)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1, 3], ["0.01", "0.03", "0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.legend(fontsize=SIZE, frameon=False)
    source(axes, f"Lesson 2, {where}")
    return axes


def loss_6():
    """The loss curves of lessons 2 and 6."""
    (one, _), (four, where) = read("lesson2"), read("lesson6")
    return curves(
        {
            "lesson 6: 4 ranks, global batch 256": (four["curves"][""], RANKS[1]),
            "lesson 2: 1 process, batch 64": (one["curves"][""], RANKS[0]),
        },
        f"Lessons 2 and 6, {where}",
    )


def loss_8():
    """The loss curves of lesson 8."""
    data, where = read("lesson8")
    names = {"unscaled": "4 ranks", "linear": "4 ranks", "alone": "1 process"}
    chosen = {
        f"{ranks}, rate {data['rates'][name]}": (data["curves"][name], color)
        for (name, ranks), color in zip(names.items(), (RANKS[1], RANKS[2], RANKS[0]))
    }
    return curves(chosen, f"Lesson 8, {where}")


def speedup_7():
    """What lesson 7 measured: images/s of N processes against one with the same threads."""
    data, where = read("lesson7")
    axes = plot()
    ratios = {}
    for run in data["runs"]:
        ratios.setdefault(run[-1][0], []).append(run[-1][1] / run[0][1])
    places, medians = range(len(ratios)), [statistics.median(x) for x in ratios.values()]
    bars = axes.bar(places, medians, width=0.5, color="#9cc9e8", label="median")
    axes.bar_label(bars, [f"{x:.2f}" for x in medians], label_type="center", size=22)
    for place, (ranks, each) in enumerate(ratios.items()):
        # One entry each in the legend.
        dots, ideal = (None, None) if place else ("each run", "ideal")
        axes.plot([place] * len(each), each, "o", color=RANKS[0], ms=9, label=dots)
        line = [place - 0.36, place + 0.36]
        axes.plot(line, [ranks] * 2, color=RANKS[1], lw=4, label=ideal)
    axes.set_xticks(places, [f"{n} process{'es' * (n > 1)}" for n in ratios])
    axes.set_ylabel("times one process", size=SIZE)
    axes.set_ylim(0, 4.6)
    axes.set_yticks(range(5))
    axes.legend(fontsize=SIZE, frameon=False, loc="upper left")
    source(axes, f"Lesson 7, {where}")
    return axes


FIGURES = [
    processes, ring, identical, data_parallel, sampler, buckets, loss_2, loss_6, loss_8, speedup_7,
    slurm, nodes, launchers, groups, chunks, streaming, restart, shards, sharded,
]  # fmt: skip


def svg(axes, name, made_from):
    """Return the figure as SVG text; all of its words lie inside of it."""
    figure = axes.figure
    figure.draw_without_rendering()
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text() and text.get_visible():
            extent = text.get_window_extent()
            inside = figure.bbox.padded(1)
            if not (inside.contains(*extent.min) and inside.contains(*extent.max)):
                sys.exit(f"{name}: {text.get_text()!r} does not fit.")
    # As outlines, so that every machine shows the same letters. Nothing that differs by the run.
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": name})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure.svg")
        metadata = {"Date": None, "Title": name, "Description": f"made from {made_from}"}
        figure.savefig(path, metadata=metadata)
        return re.sub(r"[ \t]+$", "", path.read_text(), flags=re.M)


def main():
    """Draw, check or record; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    parser.add_argument("--record", action="store_true", help="run the lessons first")
    args = parser.parse_args()
    if args.record:
        record()
    inputs = [Path(__file__), *sorted((HERE / "data").glob("*.json"))]
    made_from = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stale = {path.name for path in HERE.glob("*.svg")} - {
        f"{draw.__name__}.svg" for draw in FIGURES
    }
    for draw in FIGURES:
        path = HERE / f"{draw.__name__}.svg"
        if not args.check:
            path.write_text(svg(draw(), draw.__name__, made_from))
        # Another matplotlib may draw another curve: only what a figure is made from is compared.
        elif not path.exists() or made_from not in path.read_text():
            stale.add(path.name)
    if stale:
        print(f"Stale: {', '.join(sorted(stale))}. Run: python slides/figures/draw.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
