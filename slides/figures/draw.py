"""Draw the figures of the slides, as SVG files beside this one.

Curves and times are drawn from data/*.json, recorded from real runs; each file says when, where
and by which command. Some figures show outputs and tables that the pages hold. The other figures
explain an idea and show nothing measured.

Usage: slides/figures/draw.py            draw all figures
       slides/figures/draw.py --check    change nothing; exit status 1 if a figure is stale
       slides/figures/draw.py --record   run lessons 2, 6, 7, 8 and 10 first and write data/*.json
"""

# ruff: noqa: RUF001 (a figure may say × and −)
import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Colours that colour-blind people can tell apart (Okabe and Ito), one a rank.
RANKS = ["#0072B2", "#C24E00", "#007A59", "#8F4A86"]
INK, GREY, PALE, YELLOW = "#16191d", "#4a5058", "#eef1f4", "#ffe08a"
COMPUTE, SEND = "#9cc9e8", "#f2b48c"
LINE, DONE, SENT = "#b8bec6", "#bfe6d2", "#8a4b1c"
WIDTH = 7.8  # inches. On a phone, 343 pixels: there a text of 17 points is 10 pixels high
SIZE = 18  # points
SMALL = 17  # no text is smaller
# The first that is there. The three have the same widths; the slides have them, too.
FONTS = ["Liberation Sans", "Arial", "Helvetica", "DejaVu Sans"]
MONO = "DejaVu Sans Mono"
# The pages whose recorded output is drawn.
PRINTED = ["1_torch_dist_gpu", "5_mnist_manual_ddp_profile", "test-profile"]


# Recording


def run(*command, cwd):
    """Run a command of this repository in the folder cwd and return what it prints."""
    print("$", *command, flush=True)
    program = [sys.executable if command[0] == "python" else str(ROOT / command[0])]
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


def record_curve(name, file, *groups, launcher=None):
    """Run a lesson once; record the curve in its folder of runs/, or those of the groups there."""
    command = (*launcher, f"day2/{file}.py") if launcher else ("python", f"day1/{file}.py")
    with tempfile.TemporaryDirectory() as folder:
        output = run(*command, cwd=folder)
        runs = Path(folder, "runs", file)
        curves = {group: read_events(runs / group) for group in groups or [""]}
    proof = next(line for line in output.splitlines() if line.startswith("=>"))
    rates = dict(re.findall(r"^(\w+): .* learning rate ([\d.]+),", output, re.MULTILINE))
    write(name, " ".join(command), proof=proof, rates=rates, curves=curves)


def record_speed():
    """Run lesson 7 with 2 and with 4 processes; record what each setting gains, and its spread."""
    row = r"^(one process.*?|\w+ scaling) +\d.*  ([\d.]+) \(([\d.]+) to ([\d.]+)\)$"
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in (2, 4):
            output = run("python", "day1/7_mnist_ddp_pt_timing.py", str(processes), cwd=folder)
            found = re.findall(row, output, re.M)
            runs[processes] = {name: [float(x) for x in gains] for name, *gains in found}
    write("lesson7", "python day1/7_mnist_ddp_pt_timing.py N, with N = 2, 4", runs=runs)


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


def record_warm_up():
    """Record the defaults of lesson 8 that decide its learning rate, as its --help says them."""
    command = ("python", "day1/8_mnist_ddp_pt_lr.py", "--help")
    output = run(*command, cwd=HERE)
    names = ("processes", "lr", "warm-up")
    found = {
        name: re.search(rf"^ +(?:--)?{name} .*?\(([\d.]+)\)", output, re.M | re.S)[1]
        for name in names
    }
    write("warm_up", " ".join(command), **found)


def ask(url):
    """Return the JSON that a server answers; None while it does not answer."""
    try:
        with urlopen(url, timeout=20) as answer:
            return json.load(answer)
    except OSError:
        return None


def record_profiler():
    """Record what TensorBoard's profiler shows for traces of lesson 5: Overview, Distributed."""
    lesson = ("python", "day1/5_mnist_manual_ddp_profile.py", "--max-steps", "40")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        run(*lesson, cwd=folder)
        command = ["tensorboard.main", "--logdir=./log_ddp", "--host=127.0.0.1", "--port", port]
        server = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stderr=-3)
        try:
            url = f"http://127.0.0.1:{port}/data/plugin/pytorch_profiler"
            while not (ask(f"{url}/runs") or {}).get("runs"):
                time.sleep(1)
            query = "run=log_ddp&span=1&worker"
            steps = ask(f"{url}/overview?{query}=rank0")["steps"]
            ranks = ask(f"{url}/distributed/overlap?{query}=All")
        finally:
            server.terminate()
            server.wait()
    parts = [x["name"] for x in steps["columns"] if x["type"] == "number"]
    rows = [[number for number in row[1:] if not isinstance(number, str)] for row in steps["rows"]]
    write(
        "profiler",
        f"{' '.join(lesson)}, then tensorboard --logdir=./log_ddp",
        overview={"parts": parts, "steps": rows},
        distributed={"parts": ranks["metadata"]["legends"], "ranks": ranks["data"]["all"]},
    )


def page_of(lesson):
    """Return the text of a lesson's page of Day 2."""
    (path,) = ROOT.glob(f"day2/{lesson}_*.md")
    return path.read_text()


def table(text, head):
    """Return the table of a page whose first line begins with head: its rows, as lists of cells."""
    if head not in text:
        sys.exit(f"No table begins with {head!r} any more.")
    _, _, *rows = text[text.index(head) :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), rows)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def find(pattern, text):
    """Return the numbers of the groups of a pattern in a page."""
    found = re.search(pattern, text, re.M)
    if not found:
        sys.exit(f"No page holds {pattern!r} any more.")
    return [number(group) for group in found.groups()]


def number(text):
    """Return the number at the beginning of a text such as 1,216.6 MB."""
    return float(re.match(r"[\d.,]+", text)[0].replace(",", ""))


def take_messages():
    """Return what lesson 9 printed: [where, size of the message, bus bandwidth in MB/s]."""
    row = r"^(within a node|between nodes), .*, +(\d+ .B): .* \(bus +([\d.,]+)\)$"
    rows = re.findall(row, page_of("9"), re.M)
    return [[where, size, number(speed)] for where, size, speed in rows]


def take_links():
    """Return the ms of an all_reduce of 64 MB: {link: [measured, the least that it allows]}."""
    text, number_of_bytes = page_of("9"), 64e6
    links = {"no network": [*find(r"^between nodes, 2 ranks, 64 MB: +([\d.]+) ms", text), None]}
    measured = r"link 1gbit` we measured ([\d,]+) ms.*link 100mbit`, ([\d,]+) ms"
    for link, speed, ms in zip(("1 Gbit/s", "100 Mbit/s"), (1e9, 1e8), find(measured, text)):
        links[link] = [ms, number_of_bytes * 8 / speed * 1e3]
    return links


def take_layouts():
    """Return the images/s of LAYOUT.md's first table, [layout, way to read, images/s]."""
    rows = table((ROOT / "day2" / "LAYOUT.md").read_text(), "| layout | read |")
    return [[layout, way, int(number(speed))] for layout, way, _, speed, _ in rows]


def take_memory():
    """Return what LAYOUT.md says of memory: {file: MB streamed in rank 0 and worker, or whole}."""
    rows = table((ROOT / "day2" / "LAYOUT.md").read_text(), "| file | streamed: rank 0 |")
    return {file: [int(number(cell)) for cell in row] for file, *row in rows}


def take_ways():
    """Return what lesson 16 measured: {way: [MB sent, ms at 100 Mbit/s, ms at 1 Gbit/s]}."""
    rows = table(page_of("16"), "| way | MB sent |")
    return {way: [float(x) for x in (sent, slow, fast)] for way, sent, slow, _, fast, *_ in rows}


def take_shares():
    """Return what lesson 17 counted, in MB: {name: parameters, gradients, states, inside}."""
    rows = table(page_of("17"), "| | parameters |")
    return {name: [float(x) for x in numbers] for name, *numbers in rows}


def take_nodes():
    """Return what lesson 18 measured: rows of nodes, Mbit/s, gain predicted and measured."""
    rows = table(page_of("18"), "| nodes | link, Mbit/s |")
    return [[float(x) for x in (row[0], row[1], row[3], row[4])] for row in rows]


def record():
    """Run what the figures show and write data/*.json."""
    record_profiler()
    record_sampler()
    record_warm_up()
    record_curve("lesson2", "2_mnist_training")
    record_curve("lesson6", "6_mnist_ddp_pt")
    record_curve("lesson8", "8_mnist_ddp_pt_lr", "alone", "unscaled", "linear")
    launcher = ("scripts/multinode_setup_and_run.sh", "--local", "2x2")
    groups = ("alone", "unscaled", "linear")
    record_curve("lesson10", "10_mnist_ddp_pt_multinode", *groups, launcher=launcher)
    record_speed()


def read(name):
    """Return the recorded data, and one line on where they come from."""
    data = json.loads((HERE / "data" / f"{name}.json").read_text())
    return data, f"{data['date']}, {data['hardware']}, torch {data['versions']['torch']}"


# Drawing


def sheet(height=5.0, width=WIDTH):
    """Return axes that fill a figure of this size; one unit is one inch."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes, x, y, width, height, label="", color=PALE, ink=None, size=SIZE, **options):
    """Draw a box with its lower left corner at x, y, and a label in the middle."""
    ink = ink or ("white" if color in RANKS else INK)
    shape = f"round,pad=0,rounding_size={min(0.08, width / 4, height / 4)}"
    options = {"ec": "none", "lw": 1.5} | options
    weight = options.pop("weight", "normal")
    patch = FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=color, **options)
    axes.add_patch(patch)
    # A line of text has room for the tail of a "p" below: without this, it stands too high.
    middle = y + height / 2 - 0.07 * size / 72
    for text in say(axes, x + width / 2, middle, label, size, ink, weight=weight):
        text.inside = patch


def say(axes, x, y, text, size=SIZE, color=INK, ha="center", va="center", **options):
    """Write lines of text around the height y. Return them."""
    texts, lines = [], text.split("\n")
    for i, line in enumerate(lines):  # one by one: then all stand equally far apart
        height = y + ((len(lines) - 1) / 2 - i) * 1.22 * size / 72
        texts.append(axes.text(x, height, line, size=size, color=color, ha=ha, va=va, **options))
    return texts


def arrow(axes, begin, end, color=INK, style="-|>", **options):
    """Draw an arrow between two points."""
    options = {"lw": 2.2, "mutation_scale": 20, "shrinkA": 0, "shrinkB": 0} | options
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle=style, color=color, **options))


def bracket(axes, begin, end, y, tick=0.1, color=INK):
    """Draw a line from begin to end at height y; its ends point down, or up if tick < 0."""
    xs, ys = [begin, begin, end, end], [y - tick, y, y, y - tick]
    axes.plot(xs, ys, color=color, lw=2, solid_joinstyle="miter")


def time_axis(axes, begin, end, y=0.42):
    """Draw an arrow of time, and say that it has no scale."""
    arrow(axes, (begin, y), (end, y), color=GREY, lw=1.5)
    words = "time (a sketch: lengths are not measured)"
    say(axes, (begin + end) / 2, y - 0.22, words, SMALL, GREY)


def processes():
    """Four processes on one node, and a sum."""
    axes = sheet(4.8)
    box(axes, 0.1, 0.1, 7.6, 4.6, color="white", ec=GREY)
    say(axes, 0.35, 4.38, "one node: one machine", SMALL, GREY, "left")
    for rank, color in enumerate(RANKS):
        x = 0.35 + rank * 1.8
        middle = x + 0.85
        box(axes, x, 2.85, 1.7, 1.2, f"rank {rank}\na process", color)
        say(axes, middle, 2.53, f"holds {rank}", SIZE)
        arrow(axes, (middle, 2.3), (middle, 1.88))
        arrow(axes, (middle, 1.17), (middle, 0.75))
        say(axes, middle, 0.48, "holds 6", SIZE, weight="bold")
    box(axes, 0.35, 1.2, 7.1, 0.65, "all_reduce: 0 + 1 + 2 + 3 = 6", YELLOW, size=20)
    return axes


def ring_states(n):
    """Return what n ranks hold in each step of an all-reduce in a ring, and what is new.

    A state is parts[rank][part]: the ranks whose numbers are added up there, from 1.
    """
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
    return states, arrived


def ring():
    """All-reduce in a ring, computed step by step: 4 ranks, a tensor of 4 parts."""
    axes = sheet(5.65)
    n, cell = 4, 0.36
    states, arrived = ring_states(n)
    for number, (state, new) in enumerate(zip(states, arrived)):
        # Above: the start and the steps that add. Below: those that pass on.
        above = number < n
        x = 0.95 + (number if above else number - n + 1) * 1.74
        top = 4.87 if above else 2.1
        title = "start" if number == 0 else f"step {number}"
        say(axes, x + 2 * cell, top + 0.2, title, SMALL, GREY)
        for rank in range(n):
            y = top - 0.47 - rank * 0.48
            if number in (0, n):
                label = f"rank {rank}"
                place = 0.85 if above else x - 0.1
                say(axes, place, y + 0.2, label, SMALL, RANKS[rank], "right", weight="bold")
            for part in range(n):
                done = len(state[rank][part]) == n
                color = DONE if done else YELLOW if (rank, part) in new else "white"
                patch = Rectangle((x + part * cell, y), cell, 0.42, fc=color, ec=GREY, lw=1)
                axes.add_patch(patch)
                total = str(sum(state[rank][part]))
                say(axes, x + (part + 0.5) * cell, y + 0.19, total, SMALL)
    bracket(axes, 2.69, 2.69 + 2 * 1.74 + n * cell, 5.28)
    say(axes, 2.69 + 1.74 + 2 * cell, 5.48, "add up what arrives", SIZE)
    bracket(axes, 2.69, 2.69 + 2 * 1.74 + n * cell, 2.5)
    say(axes, 2.69 + 1.74 + 2 * cell, 2.7, "pass the sums on", SIZE)
    for y, color, words in ((1.6, YELLOW, "arrived"), (1.0, DONE, "complete")):
        box(axes, 0.1, y, 0.36, 0.36, color=color, ec=GREY, lw=1)
        say(axes, 0.55, y + 0.17, words, SMALL, GREY, "left")
    return axes


def ring_circle():
    """All-reduce in a ring, drawn as a ring: each rank sends only to the next one."""
    axes = sheet(5.9)
    places = [(3.9, 5.3), (6.45, 3.75), (3.9, 2.2), (1.35, 3.75)]
    bends = [
        ((5.05, 5.35), (6.45, 4.42)),
        ((6.45, 3.08), (5.05, 2.1)),
        ((2.75, 2.1), (1.35, 3.08)),
        ((1.35, 4.42), (2.75, 5.35)),
    ]
    for rank, ((x, y), (begin, end)) in enumerate(zip(places, bends)):
        color = RANKS[rank]
        say(axes, x, y + 0.36, f"rank {rank}", SIZE, color, weight="bold")
        for part in range(4):
            mine = part == rank  # what this rank sends in the first step
            face, ink = (color, "white") if mine else ("white", GREY)
            box(
                axes, x - 1.08 + part * 0.55, y - 0.33, 0.5, 0.48, "ABCD"[part], face, ink, ec=color
            )
        arrow(axes, begin, end, color, lw=4, mutation_scale=28, connectionstyle="arc3,rad=-0.35")
        # The middle of the arrow; the curve is arc3's.
        x = (begin[0] + end[0]) / 2 - 0.175 * (end[1] - begin[1])
        y = (begin[1] + end[1]) / 2 + 0.175 * (end[0] - begin[0])
        box(axes, x - 0.24, y - 0.22, 0.48, 0.44, "ABCD"[rank], color)
    say(axes, 3.9, 3.75, "in each step\na rank sends\none part of four\nto the next rank")
    say(axes, 3.9, 1.32, "3 steps add up, then 3 steps pass the sums on.")
    box(axes, 0.1, 0.1, 7.6, 0.95, color=YELLOW)
    say(axes, 3.9, 0.76, "Each rank sends 6 quarters: 1.5 times the tensor.", SIZE)
    say(
        axes,
        3.9,
        0.36,
        "With n ranks: 2 (n − 1) / n times, always less than 2.",
        SIZE,
        weight="bold",
    )
    return axes


def printed(page):
    """Return what the lesson of a page of Day 1 printed when it was recorded."""
    text = (ROOT / "day1" / f"{page}.md").read_text()
    return re.search(r"```console\n\$ [^\n]*\n(.*?)```", text, re.S)[1]


def why():
    """Two reasons to distribute: less time for the same data, room for a larger model."""
    axes = sheet(4.9)
    for left, title in ((0.0, "time: divide the data"), (4.0, "memory: divide the model")):
        say(axes, left + 1.9, 4.55, title, 19, va="baseline", weight="bold")
    axes.plot([3.9, 3.9], [0.2, 4.8], color=LINE, lw=1.5)
    say(axes, 0.1, 4.1, "one device", SMALL, GREY, "left")
    box(axes, 0.1, 3.3, 3.6, 0.55, "all images", RANKS[0])
    say(axes, 0.1, 2.85, "four devices", SMALL, GREY, "left")
    for rank, color in enumerate(RANKS):
        y = 2.1 - rank * 0.47
        box(axes, 0.1, y, 0.9, 0.42, "a part", color, size=SMALL)
        box(axes, 1.03, y, 0.35, 0.42, color=YELLOW)
    arrow(axes, (1.75, 1.15), (1.42, 1.15), GREY, lw=2)
    say(axes, 1.85, 1.15, "exchange", SMALL, ha="left")
    arrow(axes, (0.1, 0.42), (3.7, 0.42), GREY, lw=1.5)
    say(axes, 1.9, 0.2, "time (a sketch)", SMALL, GREY)
    say(axes, 4.1, 4.1, "one device", SMALL, GREY, "left")
    box(axes, 4.1, 2.5, 2.1, 1.4, "", "white", ec=GREY, lw=2)
    box(axes, 4.22, 2.62, 3.4, 1.0, "weights, gradients,\noptimizer", RANKS[1])
    say(axes, 5.9, 2.25, "does not fit", SMALL, RANKS[1], weight="bold")
    say(axes, 4.1, 1.8, "four devices", SMALL, GREY, "left")
    for rank, color in enumerate(RANKS):
        x = 4.1 + rank * 0.93
        box(axes, x, 0.55, 0.86, 1.02, "", "white", ec=GREY, lw=2)
        box(axes, x + 0.07, 0.62, 0.72, 0.72, "¼", color)
    say(axes, 5.9, 0.25, "each holds a part", SMALL, GREY)
    return axes


def bandwidth_1():
    """What lesson 1 printed: the bandwidth of all_reduce over the size of the tensor."""
    row = r"^ *(\d+) ([kM])B: +([\d.]+) ms .*?, +([\d.]+) MB/s"
    rows = re.findall(row, printed(PRINTED[0]), re.M)
    sizes = [int(size) * {"k": 1e-3, "M": 1.0}[unit] for size, unit, _, _ in rows]
    speeds = [float(speed) for *_, speed in rows]
    axes = plot(4.9)
    axes.set_position((0.15, 0.2, 0.81, 0.76))
    axes.loglog(sizes, speeds, "o-", color=RANKS[0], lw=3.5, ms=12)
    for x, y, (size, unit, time_taken, speed) in zip(sizes, speeds, rows):
        side, up = ("left", 0.3) if x < 0.1 else ("right", 3.6)
        words = f"{size} {unit}B in {float(time_taken):.3g} ms:\n{speed} MB/s"
        axes.annotate(words, (x, y * up), size=SIZE, ha=side, va="center", color=INK)
    axes.set_xlim(0.002, 200)
    axes.set_ylim(0.1, 10_000)
    axes.set_xticks(sizes, [f"{size} {unit}B" for size, unit, *_ in rows])
    axes.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor", size=SIZE)
    axes.set_ylabel("MB/s", size=SIZE)
    return axes


def shares(page):
    """Draw the table that lesson 5 or test-profile printed as a bar a rank."""
    rows = re.findall(r"^ +(\d+)((?: +[\d.]+%){5})$", printed(page), re.M)
    axes = plot(4.9)
    axes.set_position((0.13, 0.16, 0.8, 0.56))
    axes.grid(False)
    names = ["load data", "compute", "both at once", "communicate", "neither"]
    colors = [YELLOW, COMPUTE, DONE, SEND, "#d5dae0"]
    for name, color in zip(names, colors):
        axes.barh([-1], [0], color=color, label=name)
    for rank, numbers in rows:
        data, compute, send, both, idle = (float(x) for x in re.findall(r"[\d.]+", numbers))
        left = 0.0
        for width, color in zip((data, compute - both, both, send - both, idle), colors):
            axes.barh([int(rank)], [width], left=left, color=color, height=0.72)
            if width >= 8:
                axes.text(left + width / 2, int(rank), f"{width:.0f}", size=SIZE, ha="center",
                          va="center_baseline", color=INK)  # fmt: skip
            left += width
    axes.set_xlim(0, 100.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks([0, 25, 50, 75, 100], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank, _ in rows])
    axes.tick_params(left=False)
    axes.legend(
        fontsize=SIZE, frameon=False, loc="lower left", bbox_to_anchor=(-0.16, 1.02), ncols=3,
        handlelength=1, columnspacing=1.2, handletextpad=0.4,
    )  # fmt: skip
    return axes


def shares_5():
    """What lesson 5 printed: how each rank spends its time, with averaging by hand."""
    return shares(PRINTED[1])


def shares_profile():
    """What test-profile printed: how each rank spends its time, with DDP."""
    return shares(PRINTED[2])


def digits():
    """The first ten images of MNIST, and what is on them."""
    raw = ROOT / "data" / "MNIST" / "raw"
    images = (raw / "train-images-idx3-ubyte").read_bytes()[16:]
    labels = (raw / "train-labels-idx1-ubyte").read_bytes()[8:]
    axes = sheet(3.9)
    for i in range(10):
        x, y = 0.1 + i % 5 * 1.54, 2.36 - i // 5 * 1.9
        pixels = images[i * 784 : (i + 1) * 784]
        rows = [[255 - p for p in pixels[row * 28 : (row + 1) * 28]] for row in range(28)]
        picture = axes.figure.add_axes((x / WIDTH, y / 3.9, 1.4 / WIDTH, 1.4 / 3.9))
        picture.imshow(rows, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        picture.set(xticks=[], yticks=[])
        say(axes, x + 0.7, y - 0.2, str(labels[i]), SIZE, RANKS[0], weight="bold")
    return axes


def identical():
    """Lesson 3's identical processes beside lesson 4's data parallel ones."""
    axes = sheet(4.9)
    for left, title in ((0.0, "lesson 3: identical"), (4.0, "lesson 4: data parallel")):
        say(axes, left + 1.9, 4.55, title, 19, va="baseline", weight="bold")
        for rank, color in enumerate(RANKS):
            y = 3.55 - rank * 0.78
            say(axes, left + 0.8, y + 0.27, f"rank {rank}", SMALL, color, "right", weight="bold")
            axes.add_patch(Rectangle((left + 0.9, y), 2.8, 0.56, fc=PALE, ec=GREY, lw=1))
            if left == 0:
                axes.add_patch(Rectangle((left + 0.9, y), 2.8, 0.56, fc=color, ec="none"))
                say(axes, left + 2.3, y + 0.26, "60,000 images", SIZE, "white")
                continue
            for i in range(rank, 24, 4):  # dealt out like cards
                stripe = Rectangle((left + 0.9 + i * 2.8 / 24, y), 2.8 / 24, 0.56, fc=color)
                axes.add_patch(stripe)
    say(axes, 1.9, 0.52, "240,000 images per epoch:\nthe same model, four times")
    say(axes, 5.95, 0.52, "4 × 15,000 images per epoch:\none model")
    axes.plot([3.9, 3.9], [0.2, 4.8], color=LINE, lw=1.5)
    return axes


def data_parallel():
    """One step of data parallel training."""
    axes = sheet(4.8)
    stages = [("own batch", 0.85, 1.2), ("forward", 2.12, 1.0), ("backward", 3.19, 1.12)]
    for rank, color in enumerate(RANKS):
        y = 3.1 - rank * 0.95
        say(axes, 0.77, y + 0.33, f"rank {rank}", SMALL, color, "right", weight="bold")
        for name, x, width in stages:
            box(axes, x, y, width, 0.7, name, color, size=SMALL)
        arrow(axes, (4.33, y + 0.35), (4.66, y + 0.35))
        arrow(axes, (6.37, y + 0.35), (6.7, y + 0.35))
        box(axes, 6.73, y, 0.97, 0.7, "step", color, size=SMALL)
    box(axes, 4.7, 0.25, 1.63, 3.55, "all_reduce:\nmean of the\ngradients", YELLOW)
    say(axes, 3.0, 4.3, "other images,\nother gradients", SIZE, GREY)
    say(axes, 6.75, 4.3, "same gradients,\nsame weights", SIZE, GREY)
    return axes


def sampler():
    """What DistributedSampler deals out."""
    data, _ = read("sampler")
    axes = sheet(4.7)
    for epoch, ranks in enumerate(data["epochs"]):
        y = 3.15 - epoch * 0.8
        say(axes, 0.95, y + 0.28, f"epoch {epoch}", SIZE, ha="right")
        row = [ranks[i % 4][i // 4] for i in range(16)]
        for i, image in enumerate(row):
            box(axes, 1.05 + i * 0.417, y, 0.38, 0.6, str(image), RANKS[i % 4], size=SMALL)
    say(
        axes, 3.9, 4.28, "16 images: shuffled alike on every rank,\nthen dealt out like cards", SIZE
    )
    for rank, images in enumerate(data["epochs"][0]):
        x = 0.1 + rank * 1.92
        numbers = ", ".join(map(str, images))
        box(
            axes,
            x,
            0.25,
            1.84,
            1.6,
            f"rank {rank}\nin epoch 0:\n{numbers}",
            RANKS[rank],
            size=SMALL,
        )
    return axes


def timeline_row(axes, y, blocks, height=0.6):
    """Draw bars over the time: each has a begin, a width, a label and a colour."""
    for x, width, label, color in blocks:
        box(axes, x, y, width, height, label, color, size=SMALL)


def timeline_by_hand():
    """What a trace of lesson 5 shows: compute, then all_reduce alone; the faster rank waits."""
    axes = sheet(4.9)
    for rank, y, forward, backward in ((0, 3.1, 1.0, 1.15), (1, 1.75, 1.35, 1.75)):
        say(axes, 0.85, y + 0.3, f"rank {rank}", SIZE, RANKS[rank], "right", weight="bold")
        start = 1.0 + forward + backward + 0.06
        bars = [(1.0, forward, "forward", COMPUTE), (1.03 + forward, backward, "backward", COMPUTE)]
        bars.append((6.88, 0.82, "step", COMPUTE))
        timeline_row(axes, y, bars, 0.65)
        box(axes, start, y, 6.85 - start, 0.65, color=SEND)
    # Rank 0 begins its all_reduce, and nothing can be sent before rank 1 does.
    box(axes, 3.21, 3.1, 0.92, 0.65, "", "#fbe6d6", ec=SENT, hatch="//", lw=0)
    box(axes, 3.31, 3.2, 0.72, 0.45, "waits", "#fbe6d6", size=SMALL)
    for y in (3.1, 1.75):
        say(axes, 5.5, y + 0.31, "sends", SMALL)
    axes.plot([4.16] * 2, [1.6, 3.9], color=INK, lw=2, ls=":")
    bracket(axes, 3.21, 6.85, 3.92)
    say(
        axes,
        5.03,
        4.55,
        "one bar in the trace: all_reduce.\nWaiting counts as communication.",
        SIZE,
    )
    say(axes, 2.55, 1.45, "slower", SMALL, GREY)
    bracket(axes, 4.16, 6.85, 1.6, -0.1)
    say(axes, 5.5, 1.2, "nothing is computed meanwhile", SMALL, GREY)
    time_axis(axes, 1.0, 7.7, 0.6)
    return axes


def timeline_ddp():
    """What a trace of test-profile shows: most of the sending is hidden by backward."""
    axes = sheet(4.6)
    say(axes, 1.1, 3.33, "compute", SMALL, GREY, "right")
    say(axes, 1.1, 2.18, "send\ngradients", SMALL, GREY, "right")
    layer, send, begin = 0.72, 0.95, 2.2
    bars = [(1.2, 0.97, "forward", COMPUTE), (begin + layer + 4 * send, 0.75, "step", COMPUTE)]
    bars += [(begin + i * layer, layer - 0.03, str(4 - i), COMPUTE) for i in range(4)]
    timeline_row(axes, 3.0, bars, 0.65)
    end = begin + 4 * layer
    bracket(axes, begin, end - 0.03, 3.85)
    say(axes, (begin + end) / 2, 4.15, "backward of layers 4 to 1", SIZE)
    first = begin + layer
    for i in range(4):
        x = first + i * send
        box(axes, x, 1.85, send - 0.03, 0.65, f"{4 - i}", SEND, size=SMALL)
        at = begin + (i + 1) * layer - 0.03
        arrow(axes, (at, 2.98), (max(x + 0.04, at), 2.55), lw=1.6, mutation_scale=14)
    last = first + 4 * send - 0.03
    box(
        axes,
        end + 0.02,
        3.0,
        last - end - 0.02,
        0.65,
        "waits",
        "white",
        ec=GREY,
        ls="--",
        size=SMALL,
    )
    axes.plot([end] * 2, [1.15, 3.7], color=INK, lw=2, ls=":")
    bracket(axes, first, end - 0.06, 1.68, -0.1, RANKS[2])
    say(axes, (first + end) / 2, 1.38, "hidden", SIZE, RANKS[2], weight="bold")
    bracket(axes, end + 0.06, last, 1.68, -0.1, RANKS[1])
    say(axes, (end + last) / 2 + 0.1, 1.38, "sticks out", SIZE, RANKS[1], weight="bold")
    time_axis(axes, 1.2, 7.7, 0.62)
    return axes


def buckets():
    """When gradients are sent: lesson 4 by hand, lesson 6 with buckets."""
    axes = sheet(5.65)
    layer, first = 0.66, 2.06  # inches of a layer's backward, and where it begins

    def compute(y, end):
        say(axes, 1.05, y + 0.28, "compute", SMALL, GREY, "right")
        bars = [(1.15, 0.88, "forward", COMPUTE), (end, 0.62, "step", COMPUTE)]
        for i in range(4):
            bars.append((first + i * layer, layer - 0.03, str(4 - i), COMPUTE))
        timeline_row(axes, y, bars)
        say(axes, first + 2 * layer, y + 0.8, "backward of layer", SMALL)

    done = first + 4 * layer
    say(axes, 0.1, 5.42, "By hand (lesson 4)", SIZE, ha="left", weight="bold")
    compute(4.25, done + 2.16)
    say(axes, 1.05, 3.83, "send", SMALL, GREY, "right")
    timeline_row(axes, 3.55, [(done, 2.13, "all gradients", SEND)])
    axes.axhline(3.38, color=LINE, lw=1.5)
    words = "DistributedDataParallel (lesson 6), two buckets"
    say(axes, 0.1, 3.13, words, SIZE, ha="left", weight="bold")
    compute(1.97, done + 1.1)
    say(axes, 1.05, 1.28, "send", SMALL, GREY, "right")
    for number, (begin, color) in enumerate(((first, SEND), (first + 2 * layer, "#e6bfe0")), 1):
        full = begin + 2 * layer
        bracket(axes, begin + 0.03, full - 0.06, 1.85, -0.1, SENT)
        arrow(axes, (full - 0.06, 1.85), (full + 0.1, 1.62), SENT, lw=2, mutation_scale=14)
        box(axes, full, 1.0, 1.08, 0.6, f"bucket {number}", color, size=SMALL)
        layers = "layers 4, 3" if number == 1 else "layers 2, 1"
        say(axes, full + 0.54, 0.8, layers, SMALL, GREY)
    arrow(axes, (done + 2.78, 2.27), (done + 1.75, 2.27), color=RANKS[2])
    say(axes, done + 2.32, 2.57, "sooner", SIZE, RANKS[2], weight="bold")
    time_axis(axes, 1.15, 7.6, 0.5)
    return axes


def warm_up():
    """The learning rate of lesson 8 over the steps: it rises to that of all ranks."""
    data, _ = read("warm_up")
    ranks, low, steps = int(data["processes"]), float(data["lr"]), int(data["warm-up"])
    axes = plot(4.8)
    axes.set_position((0.19, 0.19, 0.77, 0.76))
    rates = [low + (ranks - 1) * low * min(i / steps, 1) for i in range(2 * steps + 1)]
    axes.axvspan(0, steps, color="#fff4d1")
    for rate in (low, ranks * low):
        axes.axhline(rate, color=GREY, lw=1.5, ls="--")
    axes.plot(range(len(rates)), rates, "o-", color=RANKS[0], lw=3.5, ms=9, clip_on=False)
    axes.grid(False)
    axes.set_xlim(0, 2 * steps)
    axes.set_ylim(0, ranks * low * 1.24)
    axes.set_xticks(range(0, 2 * steps + 1, 2))
    axes.set_yticks([0, low, ranks * low], ["0", f"{low:g}", f"{ranks * low:g}"])
    axes.set_xlabel("step", size=SIZE)
    axes.set_ylabel("learning rate", size=SIZE)
    high = f"{ranks} × {low:g}: for {ranks} ranks"
    say(axes, 1.5 * steps + 0.3, ranks * low * 1.09, high, SIZE)
    say(axes, 1.5 * steps + 0.3, low * 1.36, f"{low:g}: for one process", SIZE)
    say(axes, steps / 2, ranks * low * 1.16, f"warm-up: {steps} steps", SIZE, weight="bold")
    return axes


def profiler():
    """Two views of TensorBoard's profiler for lesson 5: the steps of rank 0, and all ranks."""
    data, where = read("profiler")
    figure = Figure(figsize=(WIDTH, 9))
    colors = {"Communication": SEND, "Computation": COMPUTE, "CPU Exec": COMPUTE}
    colors |= {"Overlapping": "#bfe6d2", "DataLoader": YELLOW, "Other": "#d5dae0"}
    views = [
        ("Overview: each step of rank 0", "step", data["overview"]["parts"],
         {str(5 + i): row for i, row in enumerate(data["overview"]["steps"])}, 0.6),
        ("Distributed: a step of each rank", "", data["distributed"]["parts"],
         data["distributed"]["ranks"], 0.12),
    ]  # fmt: skip
    for title, below, parts, bars, bottom in views:
        axes = figure.add_axes((0.13, bottom, 0.83, 0.26))
        heights = [0.0] * len(bars)
        for i, part in enumerate(parts):
            values = [row[i] / 1000 for row in bars.values()]
            if any(values):
                axes.bar(list(bars), values, bottom=heights, color=colors[part], label=part)
            heights = [a + b for a, b in zip(heights, values)]
        axes.set_title(title, size=SIZE, weight="bold", loc="left", pad=64)
        axes.legend(
            fontsize=SMALL, frameon=False, loc="lower left", bbox_to_anchor=(-0.14, 1.06), ncols=4,
            handlelength=1, columnspacing=1, handletextpad=0.4,
        )  # fmt: skip
        axes.locator_params(axis="y", nbins=4)
        axes.set_yticks([y for y in axes.get_yticks() if y < 0.95 * max(heights)])
        axes.set_ylabel("ms", size=SIZE)
        axes.set_xlabel(below, size=SIZE)
        axes.tick_params(labelsize=SMALL, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(list(bars)[:: max(1, len(bars) // 8)])
    source(axes, f"Lesson 5, {where}")
    return axes


def nodes():
    """Two nodes with four ranks each."""
    axes = sheet(4.7)
    for node in (0, 1):
        left = 0.1 + node * 3.9
        box(axes, left, 1.32, 3.7, 3.28, color="white", ec=GREY)
        say(axes, left + 1.85, 4.27, f"node {node}", SIZE, weight="bold")
        for local in range(4):
            rank = node * 4 + local
            x = left + 0.12 + local * 0.88
            box(axes, x, 2.55, 0.82, 1.4, f"rank\n{rank}", RANKS[local], size=19)
            say(axes, x + 0.41, 2.2, str(local), SIZE)
        bracket(axes, left + 0.2, left + 3.5, 1.95, -0.1, GREY)
        say(axes, left + 1.85, 1.65, "local rank", SIZE, GREY)
        arrow(axes, (left + 1.85, 1.3), (left + 1.85, 0.77), style="<|-|>")
    box(axes, 0.1, 0.12, 7.6, 0.62, "network between the nodes: slower than inside one", YELLOW)
    return axes


def launchers():
    """Who starts the ranks: srun, or torchrun."""
    axes = sheet(4.9)
    for left, title in ((0.1, "srun"), (4.0, "srun, then torchrun")):
        say(axes, left + 1.85, 4.55, title, 19, va="baseline", weight="bold")
        box(axes, left + 1.05, 3.7, 1.6, 0.6, "srun", YELLOW)
        for node in (0, 1):
            x = left + node * 1.88
            box(axes, x, 0.1, 1.82, 2.9, color="white", ec=GREY)
            say(axes, x + 0.91, 0.4, f"node {node}", SMALL, GREY)
            middle, ranks = x + 0.91, [x + 0.07 + local * 0.425 for local in range(4)]
            if left > 1:
                arrow(axes, (left + 1.85, 3.67), (middle, 2.87), lw=1.6)
                box(axes, x + 0.25, 2.25, 1.32, 0.6, "torchrun", SEND)
            for local, begin in enumerate(ranks):
                start = (left + 1.85, 3.67) if left < 1 else (middle, 2.23)
                arrow(axes, start, (begin + 0.2, 1.45), lw=1.4, mutation_scale=13)
                box(axes, begin, 0.75, 0.4, 0.66, str(node * 4 + local), RANKS[local], size=20)
    axes.plot([3.9, 3.9], [0.2, 4.8], color=LINE, lw=1.5)
    return axes


def groups():
    """The process groups of lesson 9: one in each node, one with a rank of every node."""
    axes = sheet(4.7)
    for node in (0, 1):
        left = 0.1 + node * 4.1
        box(axes, left, 0.75, 3.5, 3.85, color="white", ec=GREY)
        say(axes, left + 1.75, 4.3, f"node {node}", SIZE, weight="bold")
        ink = "#0072B2"
        box(axes, left + 0.12, 1.0, 3.26, 1.35, color="none", ec=ink, lw=4)
        for local in range(4):
            rank = node * 4 + local
            box(axes, left + 0.25 + local * 0.77, 1.25, 0.69, 0.85, str(rank), "#dfe5ea", size=22)
        say(axes, left + 1.75, 0.37, f"within node {node}", SIZE, ink, weight="bold")
    color = "#C24E00"
    axes.plot([0.69, 0.69, 4.79, 4.79], [2.15, 3.2, 3.2, 2.15], color=color, lw=5)
    words = "between nodes: 0 and 4"
    say(axes, 0.45, 3.57, words, SIZE, color, "left", weight="bold")
    return axes


def chunks():
    """An HDF5 file in chunks: who wants one image reads the whole chunk."""
    axes = sheet(5.2)
    box(axes, 0.1, 1.2, 7.6, 3.9, color="white", ec=GREY)
    say(axes, 0.3, 4.78, "mnist.h5", SIZE, ha="left", weight="bold")
    say(axes, 0.3, 4.05, "images", SIZE, ha="left")
    labels = ["0", "1", "2", "3", "...", "233", "234"]
    wanted, left, cell = 2, 1.5, 0.187
    for i, label in enumerate(labels):
        x = left + i * 0.9
        width = 0.84 if label != "234" else 0.58
        color = YELLOW if i == wanted else "white" if label == "..." else "#cfe3f1"
        box(axes, x, 3.7, width, 0.7, label, color, size=19)
    say(axes, 0.3, 2.12, "chunk 2", SIZE, ha="left")
    for i in range(256):
        row, column = divmod(i, 32)
        color = RANKS[1] if i == 210 else YELLOW
        place = (left + column * cell, 2.75 - row * cell)
        axes.add_patch(Rectangle(place, cell, cell, fc=color, ec="white", lw=1))
    x, top = left + wanted * 0.9, 2.75 + cell
    axes.plot([x, left], [3.68, top + 0.03], color=GREY, lw=1.5)
    axes.plot([x + 0.84, left + 32 * cell], [3.68, top + 0.03], color=GREY, lw=1.5)
    x = left + 18.5 * cell
    arrow(axes, (x, 1.07), (x, 1.6), RANKS[1], lw=3)
    say(axes, 3.9, 0.85, "One image is wanted: all 256 of its chunk are read.", SIZE)
    say(axes, 3.9, 0.35, "235 chunks of 256 images; the last one holds 96", SMALL, GREY)
    return axes


def streaming():
    """Chunks in a new order, divided among ranks and their workers."""
    order = [11, 4, 14, 0, 9, 6, 2, 13, 7, 15, 1, 10, 5, 12, 3, 8]
    axes = sheet(5.6)
    say(axes, 3.9, 5.3, "the chunks of the file, in the new order of this epoch", SIZE)
    for i, chunk in enumerate(order):
        box(axes, 0.1 + i * 0.477, 4.45, 0.43, 0.6, str(chunk), RANKS[i // 4])
    for rank, color in enumerate(RANKS):
        left = 0.1 + rank * 1.91
        box(axes, left, 0.72, 1.84, 3.3, color="white", ec=color, lw=2.5)
        say(axes, left + 0.92, 3.75, f"rank {rank}", SIZE, color, weight="bold")
        arrow(axes, (left + 0.92, 4.42), (left + 0.92, 4.05), color)
        for worker in (0, 1):
            y = 2.2 - worker * 1.38
            mine = order[rank * 4 + worker * 2 :][:2]
            box(axes, left + 0.12, y, 1.6, 1.3, color=PALE)
            say(axes, left + 0.92, y + 1.03, f"worker {worker}", SMALL)
            for i, chunk in enumerate(mine):
                box(axes, left + 0.24 + i * 0.71, y + 0.13, 0.65, 0.62, str(chunk), color, size=19)
    say(axes, 3.9, 0.35, "simplified: a share can also end in the middle of a chunk", SMALL, GREY)
    return axes


def shuffle_buffer():
    """Lesson 11's shuffle buffer: whole chunks are read, and their images mixed."""
    axes = sheet(5.9)
    order, colors = [11, 4, 14, 7, 9, 6, 2, 13], ["#cfe3f1", YELLOW, DONE, SEND]
    say(axes, 0.1, 5.65, "1. The chunks of the file, in random order", SIZE, ha="left")
    for i, chunk in enumerate(order):
        color = colors[i] if i < 4 else "white"
        box(axes, 0.1 + i * 0.955, 4.7, 0.91, 0.6, str(chunk), color, ec=GREY, lw=1)
    bracket(axes, 0.1, 0.1 + 4 * 0.955 - 0.05, 4.58, -0.1)
    bracket(axes, 0.1 + 4 * 0.955, 7.7, 4.58, -0.1, GREY)
    say(axes, 5.8, 4.3, "later", SIZE, GREY)
    arrow(axes, (2.0, 4.55), (2.0, 4.12), lw=3)
    say(axes, 0.1, 3.87, "2. A worker reads 8 chunks at once (here 4): the buffer", SIZE, ha="left")
    mixed = [2, 0, 3, 1, 1, 3, 0, 2, 0, 2, 1, 3, 3, 1, 2, 0]

    def images(y, row):
        for i, chunk in enumerate(row):
            box(axes, 0.13 + i * 0.478, y, 0.42, 0.55, str(order[chunk]), colors[chunk], size=SMALL)

    images(3.05, [i // 4 for i in range(16)])
    arrow(axes, (3.9, 2.97), (3.9, 2.47), lw=3)
    say(axes, 0.1, 2.2, "3. Its images, mixed", SIZE, ha="left")
    images(1.4, mixed)
    say(axes, 0.1, 0.95, "4. Batch after batch", SIZE, ha="left")
    for i in range(4):
        x = 0.13 + i * 4 * 0.478
        bracket(axes, x, x + 4 * 0.478 - 0.06, 1.32, -0.1)
    for i in range(4):
        box(axes, 0.13 + i * 1.912, 0.15, 1.85, 0.5, f"batch {i}")
    return axes


def slurm():
    """From the login node to ranks on compute nodes."""
    axes = sheet(4.6)
    box(axes, 0.1, 1.55, 1.75, 1.9, "login node\n\nyou type\nhere")
    box(axes, 2.9, 1.55, 1.1, 1.9, "queue\n\nyou\nwait", YELLOW)
    arrow(axes, (1.9, 2.5), (2.85, 2.5))
    say(axes, 2.36, 2.8, "salloc", SMALL)
    say(axes, 4.52, 2.8, "granted", SMALL)
    arrow(axes, (4.05, 2.5), (4.97, 2.5))
    box(axes, 5.02, 0.75, 2.68, 3.75, color="white", ec=GREY)
    say(axes, 6.36, 4.22, "your allocation", SMALL, GREY)
    for node in (0, 1):
        y = 2.5 - node * 1.63
        box(axes, 5.12, y, 2.48, 1.5)
        say(axes, 6.36, y + 1.23, f"node {node}", SMALL)
        for local in range(4):
            label = str(node * 4 + local)
            box(axes, 5.21 + local * 0.585, y + 0.18, 0.53, 0.75, label, RANKS[local], size=19)
    say(axes, 3.9, 0.35, "srun starts a process for each task, on the nodes", SIZE)
    return axes


def restart():
    """Steps, snapshots, a failure, and the second start of lesson 12."""
    axes = sheet(5.0)
    left, step = 1.0, 0.0385  # where step 0 is; inches a step

    def at(number):
        return left + number * step

    for y, name, begin, end, color in (
        (3.55, "start 1", 0, 100, RANKS[0]),
        (1.75, "start 2", 50, 165, RANKS[2]),
    ):
        say(axes, 0.9, y + 0.37, name, SIZE, ha="right")
        box(axes, at(begin), y, (end - begin) * step, 0.75, "", color)
    axes.add_patch(Rectangle((at(50), 3.55), 50 * step, 0.75, fc=SEND, ec="none"))
    say(axes, at(25), 3.91, "steps 1 to 50", SMALL, "white")
    say(axes, at(75), 3.91, "51 to 100: lost", SMALL)
    say(axes, at(75), 2.11, "51 to 100 again", SMALL, "white")
    for number in (50, 100, 150):
        y = 3.55 if number == 50 else 1.75
        axes.plot([at(number)] * 2, [y - 0.12, y + 0.87], color=INK, lw=4)
        say(axes, at(number), y + 1.07 if number == 50 else y - 0.32, "snapshot", SMALL)
    say(axes, at(100) + 0.15, 3.92, "a rank fails:\nall ranks are ended", SIZE, RANKS[1], "left")
    arrow(axes, (at(50), 3.4), (at(50), 2.55))
    say(axes, at(50) + 0.15, 2.98, "loads the snapshot", SMALL, ha="left")
    arrow(axes, (at(165), 2.12), (7.72, 2.12), RANKS[2])
    say(axes, 3.9, 0.55, "Start 2 takes the steps that\nstart 1 would have taken.", SIZE)
    return axes


def accumulation():
    """Four micro-batches, one all_reduce and one step: lesson 13's no_sync."""
    axes = sheet(5.6)
    width = 1.27
    bracket(axes, 1.0, 1.0 + 3 * width - 0.06, 5.15)
    say(axes, 1.0 + 1.5 * width, 5.37, "with model.no_sync()", SMALL, family=MONO)
    for i in range(4):
        x = 1.0 + i * width
        last = i == 3
        say(axes, x + 0.6, 4.83, f"batch {i + 1}", SIZE, weight="bold" if last else "normal")
        box(axes, x, 3.55, width - 0.06, 1.0, "forward,\nbackward", COMPUTE, size=SMALL)
        arrow(axes, (x + 0.6, 3.52), (x + 0.6, 3.13), lw=1.8, mutation_scale=15)
        box(axes, x, 1.35, width - 0.06, 1.75, color="white", ec=LINE, ls="--")
        for part in range(i + 1):
            label = f"{part + 1}"
            y = 1.4 + part * 0.42
            box(axes, x + 0.08, y, width - 0.22, 0.38, label, "#cfe3f1", size=SMALL)
    say(axes, 0.92, 4.05, "each\nrank", SMALL, GREY, "right")
    say(axes, 0.92, 2.2, "kept", SMALL, GREY, "right")
    box(axes, 6.3, 1.35, 1.42, 1.75, "all_reduce,\nonce", SEND, size=SMALL)
    arrow(axes, (6.04, 2.22), (6.28, 2.22), lw=1.8, mutation_scale=14)
    box(axes, 6.3, 3.55, 1.42, 1.0, "optimizer\nstep", DONE, size=SMALL)
    arrow(axes, (7.0, 3.12), (7.0, 3.52), lw=1.8, mutation_scale=15)
    say(axes, 2.85, 1.05, "gradients add up, nothing is sent", SIZE)
    say(
        axes,
        3.9,
        0.45,
        "4 batches per rank, 1 message: the same step as one\nbatch that is 4 times as large",
        SMALL,
        GREY,
    )
    return axes


def shards():
    """Ratings dealt out to files, then shuffled in each."""
    axes, order = sheet(3.7), [3, 0, 2, 1]
    deal = [[2, 0, 3, 1], [1, 3, 0, 2], [0, 2, 1, 3], [3, 1, 2, 0]]  # each part is shuffled
    for x, title in (
        (1.1, "parts of the\nratings"),
        (4.35, "1. each dealt out\nlike cards"),
        (6.72, "2. each file\nshuffled"),
    ):
        say(axes, x, 3.32, title, SMALL, GREY)
    for part in range(4):
        for place in range(4):
            x, y = 0.1 + place * 0.5, 2.2 - part * 0.68
            box(axes, x, y, 0.45, 0.58, str(part * 4 + place), RANKS[part], size=SMALL)
    for file in range(4):
        y = 2.2 - file * 0.68
        say(axes, 3.28, y + 0.28, f"file {file}", SMALL, GREY, "right")
        numbers = [part * 4 + deal[part][file] for part in range(4)]
        shuffled = [numbers[order[(place + file) % 4]] for place in range(4)]
        for left, row in ((3.35, numbers), (5.75, shuffled)):
            for place, number in enumerate(row):
                box(
                    axes,
                    left + place * 0.5,
                    y,
                    0.45,
                    0.58,
                    str(number),
                    RANKS[number // 4],
                    size=SMALL,
                )
    arrow(axes, (2.12, 1.48), (2.6, 1.48))
    arrow(axes, (5.34, 1.48), (5.72, 1.48))
    return axes


def recommender():
    """Lesson 14: of a table's gradient only the rows that a batch has used are sent."""
    axes = sheet(5.9)
    touched = [[2, 5, 7], [5, 9, 1]]  # the users in each rank's batch
    for rank, left in ((0, 0.1), (1, 5.6)):
        color = RANKS[rank]
        users = ", ".join(map(str, touched[rank]))
        say(axes, left + 1.2, 5.68, f"rank {rank}", SIZE, color, weight="bold")
        say(axes, left + 1.2, 5.36, f"users {users}", SMALL, color)
        for row in range(10):
            y = 4.86 - row * 0.345
            used = row in touched[rank]
            say(axes, left + 0.3, y + 0.13, str(row), SMALL, color if used else GREY, "right")
            for column in range(9):
                x = left + 0.38 + column * 0.19
                face = color if used else "white"
                axes.add_patch(Rectangle((x, y), 0.19, 0.3, fc=face, ec=LINE, lw=1))
    say(axes, 3.9, 5.3, "gradient of the table:\na row for each user", SIZE)
    box(axes, 2.72, 1.75, 2.36, 2.95, color=YELLOW)
    say(axes, 3.9, 4.44, "all_gather", SIZE, weight="bold")
    rows = [(rank, row) for rank in (0, 1) for row in touched[rank]]
    for i, (rank, row) in enumerate(rows):
        y = 3.83 - i * 0.39
        box(axes, 2.85, y, 0.42, 0.34, str(row), "white", RANKS[rank], size=SMALL)
        for column in range(9):
            x = 3.35 + column * 0.18
            axes.add_patch(Rectangle((x, y), 0.18, 0.34, fc=RANKS[rank], ec="white", lw=1))
    arrow(axes, (2.22, 3.2), (2.69, 3.2), RANKS[0], lw=3)
    arrow(axes, (5.58, 3.2), (5.11, 3.2), RANKS[1], lw=3)
    say(
        axes,
        3.9,
        1.28,
        "Each rank gets the numbers and gradients of these\nrows, not of the whole table.",
        SIZE,
    )
    say(
        axes,
        3.9,
        0.45,
        "What comes twice (here row 5) is added up.\n"
        "SparseAdam changes only these rows. Movies: a second table.",
        SMALL,
        GREY,
    )
    return axes


def accelerate():
    """What lesson 15 writes by hand and as calls of Accelerate, side by side."""
    rows = [
        (["init_process_group()"], ["Accelerator()"]),
        (
            ["model.to(device)", "DistributedDataParallel", "DistributedSampler", "x.to(device)"],
            [".prepare(", "  model,", "  optimizer,", "  loader)"],
        ),
        (["loss.backward()"], [".backward(loss)"]),
        (["all_reduce(losses)"], [".reduce(losses)"]),
        (["get_rank() == 0"], [".is_main_process"]),
        (["barrier()"], [".wait_for_everyone()"]),
        (["destroy_process_group()"], [".end_training()"]),
    ]
    axes = sheet(5.7)
    say(axes, 0.25, 5.43, "by hand (lesson 10)", SIZE, ha="left", weight="bold")
    say(axes, 4.5, 5.43, "with an Accelerator", SIZE, ha="left", weight="bold")
    y = 5.15
    for left, right in rows:
        height = 0.3 * len(left) + 0.21
        y -= height + 0.07
        box(axes, 0.1, y, 3.65, height, color=PALE)
        box(axes, 4.35, y, 3.35, height, color=YELLOW)
        arrow(axes, (3.8, y + height / 2), (4.3, y + height / 2), lw=2)
        for x, lines in ((0.25, left), (4.5, right)):
            for i, line in enumerate(lines):
                at = y + height - 0.26 - i * 0.3
                say(axes, x, at, line, SMALL, ha="left", family=MONO)
    return axes


def powersgd():
    """PowerSGD: two thin matrices are sent in place of a gradient; the error is kept."""
    n, m, r = 1536, 512, 8  # lesson 16's layer fc1 and its MATRIX_RANK
    axes = sheet(5.7)
    box(axes, 0.6, 3.15, 2.3, 1.75, "M", COMPUTE, size=26)
    say(axes, 1.75, 5.3, f"the gradient of a layer\n{n} × {m} = {n * m:,}", SMALL)
    say(axes, 3.3, 4.02, "≈", 30)
    box(axes, 3.75, 3.15, 0.5, 1.75, "P", SEND, size=26)
    say(axes, 4.0, 5.12, f"{n} × {r}", SMALL)
    say(axes, 4.62, 4.02, "×", 30)
    box(axes, 5.0, 3.77, 2.3, 0.5, "Q", SEND, size=26)
    say(axes, 6.15, 4.5, f"{r} × {m}", SMALL)
    bracket(axes, 3.75, 7.3, 2.95, -0.1)
    arrow(axes, (5.52, 2.93), (5.52, 2.57), SENT, lw=3)
    box(axes, 3.75, 1.5, 3.55, 1.05, f"all_reduce of P and Q only:\n{r * (n + m):,} numbers", SEND)
    box(axes, 0.6, 1.5, 2.3, 1.05, "error = M − P × Q\nstays on the rank", DONE, size=SMALL)
    arrow(axes, (2.3, 3.12), (2.3, 2.58))
    points = [(0.58, 2.0), (0.25, 2.0), (0.25, 4.02), (0.45, 4.02)]
    axes.plot(*zip(*points), color=RANKS[2], lw=3)
    arrow(axes, (0.4, 4.02), (0.6, 4.02), RANKS[2], lw=3)
    say(
        axes,
        3.9,
        0.8,
        "The error is added to the gradient of the next step:\nwhat is left out now is sent later.",
        SIZE,
    )
    return axes


def local_sgd():
    """Local SGD: the ranks part, step by step, and meet again at the mean of their parameters."""
    axes, period, means = sheet(5.2), 8, [1.35, 2.75, 3.5, 3.95]
    # What each rank adds to the common way at the end of a period: 0 on average.
    spread = [[0.75, -0.35, 0.25, -0.65], [-0.25, 0.4, -0.7, 0.55], [0.65, -0.6, 0.25, -0.3]]
    width = 2.2
    for part in range(3):
        left, begin, end = 0.75 + part * width, means[part], means[part + 1]
        for rank, color in enumerate(RANKS):
            xs, ys = [], []
            for step in range(period + 1):
                share = step / period
                wiggle = 0.07 * ((step * (rank + 2) + part) % 3 - 1) * (0 < step < period)
                xs.append(left + share * width)
                ys.append(begin + share * (end - begin + spread[part][rank]) + wiggle)
            axes.plot(xs, ys, color=color, lw=2, marker="o", ms=5)
            axes.plot([xs[-1]] * 2, [ys[-1], end], color=color, lw=2, ls=":")
        axes.plot(left + width, end, marker="D", color=INK, ms=13, zorder=3)
    axes.plot(0.75, means[0], marker="D", color=INK, ms=13, zorder=3)
    bracket(axes, 0.75, 0.75 + width, 0.72, -0.1)
    say(axes, 0.75 + width / 2, 0.45, f"{period} steps alone", SIZE)
    bracket(axes, 0.82 + width, 7.4, 0.72, -0.1)
    say(axes, 0.82 + 2 * width, 0.45, "the same again", SIZE, GREY)
    for rank, color in enumerate(RANKS):
        say(axes, 0.3, 4.0 - rank * 0.32, f"rank {rank}", SMALL, color, "left", weight="bold")
    say(axes, 0.1, 4.92, "a parameter of the model, on each rank (a sketch)", SMALL, GREY, "left")
    axes.plot(3.6, 1.35, marker="D", color=INK, ms=13)
    say(axes, 3.85, 1.35, "all_reduce: all take the mean", SMALL, ha="left")
    return axes


def skipped_collective():
    """A hang: rank 2 skips a collective, and the others wait in it until the timeout."""
    axes = sheet(5.5)
    say(axes, 1.95, 5.15, "all_reduce\nnumber 1", SMALL)
    say(axes, 4.8, 5.15, "all_reduce\nnumber 2", SMALL)
    for rank, color in enumerate(RANKS):
        y = 4.05 - rank * 0.9
        say(axes, 0.85, y + 0.32, f"rank {rank}", SIZE, color, "right", weight="bold")
        box(axes, 1.0, y, 0.5, 0.65, color=COMPUTE)
        box(axes, 1.53, y, 0.85, 0.65, "done", DONE, size=SMALL)
        box(axes, 2.41, y, 0.7, 0.65, color=COMPUTE)
        if rank == 2:
            box(
                axes,
                3.14,
                y,
                0.9,
                0.65,
                "if ...",
                "white",
                size=SMALL,
                ec=RANKS[1],
                ls="--",
                lw=2.5,
            )
            box(axes, 4.07, y, 2.4, 0.65, "goes on without it", COMPUTE, size=SMALL)
            say(axes, 7.11, y + 0.32, "is ended", SMALL, GREY)
            continue
        box(axes, 3.14, y, 3.35, 0.65, "waits for rank 2", "#fbe6d6", size=SMALL, ec=SENT)
        box(axes, 6.52, y, 1.18, 0.65, "error", "#a31515", "white", weight="bold")
    axes.plot([6.5] * 2, [1.2, 4.85], color="#a31515", lw=2.5, ls=":")
    say(axes, 6.95, 5.15, "timeout", SIZE, "#a31515", weight="bold")
    say(axes, 3.9, 0.93, "The error comes from the ranks that waited, not from rank 2.", SMALL)
    time_axis(axes, 1.0, 7.7, 0.5)
    return axes


def sharded():
    """What a rank holds of the model between the steps: with DDP all, with FSDP a part."""
    axes, unit = sheet(5.4), 0.82  # inches high for 4 bytes a parameter
    parts = [("Adam's states", 2, DONE), ("gradients", 1, SEND), ("parameters", 1, COMPUTE)]
    for left, title, share in ((0.1, "DDP", 1), (4.0, "fully_shard, 4 ranks", 4)):
        say(axes, left + 1.85, 5.05, title, 19, va="baseline", weight="bold")
        for rank in range(4):
            x, y = left + rank * 0.94, 1.5
            say(axes, x + 0.44, 1.25, f"rank {rank}", SMALL, RANKS[rank], weight="bold")
            if share > 1:  # what the other ranks hold
                box(axes, x, y, 0.88, 4 * unit - 0.03, color="white", ec="#c9d0d8", ls="--")
            # From below: parameters, gradients, states, each as high as it has bytes.
            for _, size, color in reversed(parts):
                height = size * unit / share
                axes.add_patch(Rectangle((x, y), 0.88, height, fc=color, ec="white", lw=1.5))
                if share == 1:
                    say(axes, x + 0.44, y + height / 2, str(4 * size), SIZE)
                y += height
    background = {"fc": "white", "ec": "none"}
    words = "16 / 4 = 4 bytes\nper parameter"
    say(axes, 5.85, 3.5, words, SIZE, bbox=background)
    say(axes, 3.9, 0.8, "bytes that a rank keeps for each parameter of the model", SMALL, GREY)
    for x, (name, _, color) in zip((0.3, 2.9, 5.1), parts):
        box(axes, x, 0.2, 0.36, 0.34, color=color)
        say(axes, x + 0.46, 0.36, name, SIZE, ha="left")
    return axes


def fsdp_time():
    """One rank of lesson 17 over the time: what it gathers, computes, frees and sends."""
    axes = sheet(5.6)
    slot, left = 0.945, 1.08

    def bars(y, height, entries, color):
        for place, label in entries.items():
            x = left + place * slot
            box(axes, x, y, slot - 0.05, height, label, color, size=SMALL)

    say(axes, 1.0, 4.1, "compute", SMALL, GREY, "right")
    bars(3.65, 0.9, {1: "layer 1", 2: "layer 2", 4: "layer 2", 5: "layer 1"}, COMPUTE)
    bracket(axes, left + slot, left + 3 * slot - 0.05, 4.72)
    say(axes, left + 2 * slot, 4.97, "forward", SIZE, weight="bold")
    bracket(axes, left + 4 * slot, left + 6 * slot - 0.05, 4.72)
    say(axes, left + 5 * slot, 4.97, "backward", SIZE, weight="bold")
    say(axes, 1.0, 2.95, "network", SMALL, GREY, "right")
    gather = {0: "gather\n1", 1: "gather\n2", 3: "gather\n2", 4: "gather\n1"}
    bars(2.5, 0.9, gather, SEND)
    bars(2.5, 0.9, {5: "scatter\n2", 6: "scatter\n1"}, "#e6bfe0")
    say(axes, 1.0, 1.97, "whole\nlayers", SMALL, GREY, "right")
    for place, number in ((1, 1), (2, 2), (4, 2), (5, 1)):
        x = left + place * slot
        box(axes, x, 1.75, slot - 0.05, 0.42, str(number), YELLOW, size=SMALL)
    for place in (3, 6):
        say(axes, left + (place + 0.47) * slot, 1.96, "freed", SMALL, GREY)
    say(
        axes,
        0.1,
        1.35,
        "gather: all_gather of parameters, before they are needed",
        SMALL,
        ha="left",
    )
    say(axes, 0.1, 1.02, "scatter: reduce_scatter, the mean of the gradients", SMALL, ha="left")
    say(axes, 0.1, 5.38, "one rank, a model of two layers", SMALL, GREY, "left")
    time_axis(axes, left, 7.7, 0.55)
    return axes


def step_time():
    """What lesson 18 adds up: buckets of gradients that are sent while backward computes."""
    axes = sheet(4.75)
    say(axes, 1.1, 3.28, "compute", SMALL, GREY, "right")
    say(axes, 1.1, 2.13, "send", SMALL, GREY, "right")
    backward, end = 2.25, 5.25
    bars = [(1.2, 1.02, "forward", COMPUTE), (backward, end - backward, "backward", COMPUTE)]
    last = 6.75
    bars.append((last, 0.9, "step", COMPUTE))
    timeline_row(axes, 2.95, bars, 0.65)
    for full, begin, width, label in ((3.55, 3.55, 1.4, "bucket 1"), (end, end, 1.47, "bucket 2")):
        box(axes, begin, 1.8, width, 0.65, label, SEND, size=SMALL)
        arrow(axes, (full - 0.03, 2.93), (full + 0.03, 2.5), SENT, lw=2, mutation_scale=14)
    say(axes, 3.5, 4.0, "full", SIZE, SENT)
    arrow(axes, (3.52, 3.82), (3.52, 3.62), SENT, lw=2, mutation_scale=14)
    say(axes, end - 0.03, 4.0, "full", SIZE, SENT)
    arrow(axes, (end - 0.03, 3.82), (end - 0.03, 3.62), SENT, lw=2, mutation_scale=14)
    say(axes, 1.2, 4.45, "Each bucket: latency + size / bandwidth", SIZE, ha="left", weight="bold")
    bracket(axes, 3.55, 4.95, 1.63, -0.1, RANKS[2])
    say(axes, 4.25, 1.33, "hidden", SIZE, RANKS[2], weight="bold")
    bracket(axes, end + 0.03, last - 0.03, 1.63, -0.1, RANKS[1])
    say(axes, 6.05, 1.33, "makes it longer", SIZE, RANKS[1], weight="bold")
    time_axis(axes, 1.2, 7.7, 0.62)
    return axes


def course_map():
    """All lessons in order: what each adds, and which of them give the same losses."""
    axes = sheet(7.0, 9.0)
    first = ["all_reduce", "on GPUs:\nbandwidth", "one\nprocess", "4 times\nthe same"]
    first += ["gradients\nby hand", "profiler", "DDP", "timing", "learning\nrate"]
    second = ["all_reduce", "lesson 8\non nodes", "data from\ndisk"]
    beyond = ["restart", "full\nrecipe", "sparse\ngradients", "Accelerate"]
    beyond += ["slow\nnetwork", "FSDP", "a second\nnode?"]
    number, middle = 0, {}
    for title, top, words in (
        ("Day 1: one node", 6.74, first),
        ("Day 2: many nodes", 4.06, second),
        ("Beyond the two days", 2.4, beyond),
    ):
        say(axes, 0.1, top, title, 19, "#003f6b", "left", weight="bold")
        for i, text in enumerate(words):
            x, y = 0.1 + i % 5 * 1.775, top - 1.02 - i // 5 * 1.04
            same = number in (2, 4, 6)
            color, edge = (DONE, RANKS[2]) if same else (PALE, PALE)
            box(axes, x, y, 1.7, 0.78, color=color, ec=edge, lw=2.5)
            say(axes, x + 0.27, y + 0.37, str(number), 19, "#003f6b", weight="bold")
            say(axes, x + 1.1, y + 0.37, text, SMALL)
            middle[number] = (x + 0.85, y + 0.39)
            number += 1
    # One line joins those with the same losses; it runs between the rows.
    style = {"color": RANKS[2], "lw": 5, "zorder": 0.5}
    between = (middle[4][1] + middle[6][1]) / 2
    axes.plot([middle[4][0], middle[6][0]], [between] * 2, **style)
    for one in (2, 4, 6):
        axes.plot([middle[one][0]] * 2, [middle[one][1], between], **style)
    words = "2 = 4 = 6: the same losses, if the global\nbatch is the same (10 gives lesson 8's)"
    say(axes, 2.95, 4.25, words, SIZE, RANKS[2], "left", weight="bold")
    return axes


def plot(height=5.0):
    """Return axes for a chart, with large letters."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.13, 0.27, 0.81, 0.7))
    axes.tick_params(labelsize=SIZE, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d5dae0")
    axes.set_axisbelow(True)
    return axes


def source(axes, text):
    """Say below a chart where its numbers come from."""
    axes.figure.text(0.985, 0.025, text, size=SMALL, color=GREY, ha="right")


def smooth(points, groups=60):
    """Return images seen and mean loss, each over an equal part of the curve."""
    bounds = [round(i * len(points) / groups) for i in range(groups + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    xs = [part[-1][0] for part in parts]
    return xs, [sum(loss for _, loss in part) / len(part) for part in parts]


def loss_axes(last, where):
    """Return axes for loss curves over the images seen, up to the last one."""
    axes = plot()
    axes.set_yscale("log")
    axes.set_xlabel("images seen", size=SIZE)
    axes.set_ylabel("training loss", size=SIZE)
    axes.set_xlim(0, 1.01 * last)
    axes.set_xticks(range(0, last + 1, round(last / 4000) * 1000))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    source(axes, where)
    return axes


def finish(axes, ticks):
    """Label the losses, and the curves."""
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=SIZE, frameon=False)
    return axes


def curves(named, where):
    """Draw loss curves {label: (points, colour)} over the images seen."""
    axes = loss_axes(max(points[-1][0] for points, _ in named.values()), where)
    for label, (points, color) in named.items():
        axes.plot(*smooth(points), color=color, lw=3.5, label=label)
    return finish(axes, [0.03, 0.1, 0.3, 1, 3])


def loss_2():
    """The loss curve of lesson 2."""
    data, where = read("lesson2")
    points = data["curves"][""]
    axes = loss_axes(points[-1][0], f"Lesson 2, {where}")
    axes.plot(*zip(*points), color="#b9d4e6", lw=1, label="each batch of 64")
    axes.plot(*smooth(points), color=RANKS[0], lw=3.5, label="mean of about 31 batches")
    axes.set_ylim(0.01, 3)
    return finish(axes, [0.01, 0.03, 0.1, 0.3, 1, 3])


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


def loss_10():
    """The loss curves of lesson 10 on two nodes, over those of lesson 8 on one."""
    (one, _), (two, where) = read("lesson8"), read("lesson10")
    axes = loss_axes(one["curves"]["linear"][-1][0], f"Lessons 8 and 10, {where}")
    for name, color in zip(("unscaled", "linear", "alone"), (RANKS[1], RANKS[2], RANKS[0])):
        axes.plot(*smooth(one["curves"][name]), color=color, lw=3, label=name)
        axes.plot(*smooth(two["curves"][name]), "o", color=color, ms=10, mew=2, mfc="none")
    axes.plot([], [], "o", color=GREY, ms=10, mew=2, mfc="none", label="circles: two nodes")
    return finish(axes, [0.1, 0.3, 1, 3])


def speedup_7():
    """What lesson 7 measured: images/s against one process, medians and spreads."""
    data, where = read("lesson7")
    axes = plot()
    highest = 0
    for shift, name, color in ((-0.2, "weak", COMPUTE), (0.2, "strong", YELLOW)):
        gains = [run[f"{name} scaling"] for run in data["runs"].values()]
        places = [place + shift for place in range(len(gains))]
        medians = [gain for gain, _, _ in gains]
        spread = [[m - low for m, low, _ in gains], [high - m for m, _, high in gains]]
        error = {"ecolor": INK, "lw": 2.5, "capsize": 6}
        bars = axes.bar(places, medians, 0.38, color=color, yerr=spread, error_kw=error)
        bars.set_label(f"{name} scaling")
        labels = [f"{m:.2f}" for m in medians]
        for place, label in zip(places, labels):
            say(axes, place, 0.12, label, 22)
        highest = max(highest, *(high for *_, high in gains))
    (cores, *_) = data["runs"]["2"]["one process, all cores"]
    label = "one process, all cores"
    axes.axhline(cores, color=RANKS[1], lw=4, ls="--", label=label)
    axes.axhline(1, color=GREY, lw=2)
    axes.set_xticks(range(len(data["runs"])), [f"{n} processes" for n in data["runs"]])
    axes.set_ylabel("times one process", size=SIZE)
    top = 1.7 * max(highest, cores)
    axes.set_ylim(0, top)
    ticks = matplotlib.ticker.MaxNLocator(4).tick_values(0, top)
    axes.set_yticks([x for x in ticks if x <= top])
    axes.legend(fontsize=SIZE, frameon=False, loc="upper left")
    source(axes, f"Lesson 7, {where}")
    return axes


def messages_9():
    """What lesson 9 measured: the bus bandwidth of small and large messages."""
    data = take_messages()
    axes = plot(5.0)
    axes.set_position((0.17, 0.19, 0.77, 0.74))
    sizes = {"4 kB": 4e3, "1 MB": 1e6, "64 MB": 64e6}
    labels = {"within a node": RANKS[0], "between nodes": RANKS[1]}
    for where, color in labels.items():
        rows = [(sizes[size], bus) for place, size, bus in data if place == where]
        axes.plot(*zip(*rows), "o-", color=color, lw=3.5, ms=11, label=where)
    axes.set(xscale="log", yscale="log", xlim=(2e3, 2e8), ylim=(1, 5000))
    axes.set_xticks(list(sizes.values()), list(sizes))
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.set_xlabel("message, log scale", size=SIZE)
    axes.set_ylabel("bus bandwidth, MB/s, log scale", size=SIZE)
    axes.legend(fontsize=SIZE, edgecolor="none", framealpha=1, loc="upper left")
    words = "lesson 9 on imitated nodes:\nno network between them"
    axes.figure.text(0.92, 0.26, words, size=SIZE, color=GREY, ha="right")
    return axes


def link_9():
    """An all_reduce of 64 MB between two nodes: what the link allows, and what was measured."""
    data = take_links()
    axes = plot(4.4)
    axes.set_position((0.22, 0.2, 0.68, 0.66))
    axes.grid(False)
    axes.grid(axis="x", color="#d5dae0")
    places = range(len(data))[::-1]
    measured = [ms for ms, _ in data.values()]
    axes.barh(places, measured, height=0.5, color=SEND, label="measured")
    label = "the least that the link allows"
    for place, (ms, least) in zip(places, data.values()):
        words = f"{ms:,.0f} ms"
        if least:
            words += f", least {least:,.0f}"
            ys = [place - 0.33, place + 0.33]
            axes.plot([least] * 2, ys, color=RANKS[0], lw=5, label=label)
            label = None
        # Inside of long bars, beside short ones.
        x, ha = (ms / 1.4, "right") if ms > 1000 else (ms * 1.15, "left")
        say(axes, x, place, words, SIZE, ha=ha)
    axes.set(xscale="log", xlim=(10, 10000), ylim=(-0.6, len(data) - 0.4))
    axes.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
    axes.minorticks_off()
    axes.set_xlabel("ms, log scale", size=SIZE)
    axes.set_yticks(places, list(data))
    axes.legend(
        fontsize=SIZE, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.36, 0.98)
    )
    return axes


def interfaces():
    """A node with a slow and a fast network card, and what NCCL_SOCKET_IFNAME chooses."""
    axes = sheet(4.7)
    for node, left in ((0, 0.1), (1, 5.2)):
        box(axes, left, 0.1, 2.5, 4.5, color="white", ec=GREY)
        say(axes, left + 1.25, 4.3, f"node {node}", SIZE, weight="bold")
        x = left + 1.35 if node == 0 else left + 0.1
        box(axes, x, 3.0, 1.05, 0.8, "eth0", YELLOW, size=19)
        box(axes, x, 0.5, 1.05, 2.05, "ib0", SEND, size=19)
        ranks = left + 0.12 if node == 0 else left + 1.3
        box(axes, ranks, 0.5, 1.08, 3.3, "ranks", RANKS[0])
    for y, above, below, color in (
        (3.4, "login, ssh", "slow", GREY),
        (2.15, "gloo: all of it", "NCCL: first contact", RANKS[1]),
        (0.9, "NCCL on InfiniBand:", "the data (no sockets)", SENT),
    ):
        arrow(axes, (2.62, y), (5.18, y), color, style="<|-|>", lw=3)
        say(axes, 3.9, y + 0.23, above, SMALL, color)
        say(axes, 3.9, y - 0.26, below, SMALL, color)
    return axes


def layout_speed():
    """What the layout of a file decides: images/s, read one at a time or in whole chunks."""
    data = take_layouts()
    shown = [
        ("HDF5, not chunked", "one at a time", "not chunked"),
        ("HDF5, chunks of 256", "one at a time", "chunks of 256"),
        ("HDF5, chunks of 256, gzip 4", "one at a time", "chunks, gzip"),
        ("memmap", "one at a time", "memmap"),
        ("HDF5, chunks of 256", "whole chunks", "chunks of 256"),
        ("HDF5, chunks of 256, gzip 4", "whole chunks", "chunks, gzip"),
        ("memmap", "blocks of 256", "memmap"),
    ]
    speeds = {(layout, read): speed for layout, read, speed in data}
    axes = plot(4.9)
    axes.set_position((0.23, 0.16, 0.72, 0.72))
    axes.grid(False)
    axes.grid(axis="x", color="#d5dae0")
    places = [7.6, 6.6, 5.6, 4.6, 3, 2, 1]
    for place, (layout, way, _) in zip(places, shown):
        speed = speeds[layout, way]
        color = SEND if way == "one at a time" else DONE
        axes.barh(place, speed, height=0.75, color=color)
        inside = speed > 1e5
        x, ha = (speed / 1.15, "right") if inside else (speed * 1.15, "left")
        say(axes, x, place - 0.08, f"{speed:,}", SIZE, ha=ha)
    axes.set(xscale="log", xlim=(500, 1e7), ylim=(0.4, 8.2))
    axes.set_xticks([1e3, 1e4, 1e5, 1e6, 1e7], ["1,000", "10,000", "100,000", "1 million", ""])
    axes.minorticks_off()
    axes.set_yticks(places, [label for _, _, label in shown])
    axes.set_xlabel("images/s, log scale", size=SIZE)
    words = "orange: one image at a time\ngreen: whole chunks, blocks of 256"
    axes.figure.text(0.955, 0.93, words, size=SIZE, color=GREY, ha="right", va="center")
    return axes


def memory_file():
    """What streaming holds in memory, for a file and for one that is 20 times as large."""
    data = take_memory()
    axes = plot(4.7)
    axes.set_position((0.14, 0.2, 0.83, 0.75))
    names = ["streamed:\nrank 0", "and its\nworker", "from memory:\nrank 0"]
    for i, ((file, sizes), color) in enumerate(zip(data.items(), (COMPUTE, RANKS[0]))):
        places = [place + (i - 0.5) * 0.38 for place in range(3)]
        bars = axes.bar(places, sizes, width=0.36, color=color, label=file)
        axes.bar_label(bars, [f"{x:,}" for x in sizes], size=SIZE, padding=3)
    axes.set_xticks(range(3), names)
    axes.set_ylabel("MB", size=SIZE)
    axes.set_ylim(0, 1650)
    axes.set_yticks([0, 400, 800, 1200])
    axes.legend(fontsize=SIZE, frameon=False, loc="upper left", ncols=2)
    return axes


def parallelism():
    """Which way for my job: what to ask of a training step, and what the answer leads to."""
    axes = sheet(5.9)
    questions = [
        (4.55, "Does a step fit into one\nGPU? Adam: 16 bytes a\nparameter, and activations"),
        (2.6, "Does a part fit? 16 / N\nbytes, one whole layer,\nand activations"),
        (0.75, "What does not fit: the\nlayers, or a single one?"),
    ]
    answers = [
        (5.25, "fast enough: one GPU", PALE),
        (4.5, "too slow: DDP (lesson 6)", DONE),
        (3.68, "and slow link: lesson 16", DONE),
        (2.83, "FSDP (lesson 17)", DONE),
        (1.42, "the layers: pipeline", YELLOW),
        (0.57, "a layer: tensor parallel", YELLOW),
    ]
    for y, words in questions:
        box(axes, 0.1, y, 3.25, 1.2 if words.count("\n") > 1 else 0.95, words, COMPUTE, size=SMALL)
    for y, words, color in answers:
        box(axes, 4.55, y, 3.15, 0.6, words, color)
    for start, end, word in (
        (5.15, 5.5, "yes"),
        (5.15, 4.8, ""),
        (3.13, 3.13, "yes"),
        (1.22, 1.72, ""),
        (1.22, 0.87, ""),
    ):
        arrow(axes, (3.4, start), (4.5, end), lw=2)
        if word:
            say(axes, 3.85, max(start, end) + 0.17, word, SMALL, GREY)
    arrow(axes, (6.1, 4.48), (6.1, 4.3), lw=2, mutation_scale=14)
    for y in (4.52, 2.57):
        arrow(axes, (1.7, y), (1.7, y - 0.69 if y > 4 else 1.73))
        say(axes, 2.0, y - 0.36, "no", SMALL, GREY)
    say(axes, 3.9, 0.2, "Large jobs combine them: one inside a node, another between.", SMALL, GREY)
    return axes


def whole_file():
    """A job is killed while it saves: what lies under the snapshot's name then."""
    axes = sheet(5.0)
    half = ("half a file", SEND)
    direct = {"snapshot.pt": half}
    renamed = {"snapshot.pt": ("the last snapshot", DONE), "snapshot.71": half}
    for top, title, files, result, color in (
        (4.72, "written under its own name", direct, "nothing to load", RANKS[1]),
        (2.6, "written under another name, then renamed", renamed, "loads the last one", RANKS[2]),
    ):
        say(axes, 0.1, top, title, SIZE, ha="left", weight="bold")
        for i, (name, (words, face)) in enumerate(files.items()):
            y = top - 0.95 - i * 0.75
            say(axes, 0.1, y + 0.3, name, SMALL, ha="left", family=MONO)
            width = 1.5 if "half" in words else 3.0
            box(axes, 1.8, y, width, 0.62, words, face, size=SMALL)
            if "half" in words:
                box(axes, 1.8, y, 3.0, 0.62, color="none", ec=GREY, ls="--")
        y = top - 0.95 - (len(files) - 1) * 0.375
        arrow(axes, (4.95, y + 0.3), (5.35, y + 0.3), color)
        say(axes, 6.55, y + 0.3, result, SIZE, color, weight="bold")
    axes.plot([3.33, 3.33], [0.55, 1.6], color="#a31515", lw=3)
    axes.plot([3.33, 3.33], [3.6, 4.5], color="#a31515", lw=3)
    say(axes, 3.33, 0.3, "killed here", SIZE, "#a31515", weight="bold")
    axes.plot([0.1, 7.7], [3.1, 3.1], color=LINE, lw=1.5)
    return axes


def stop_together():
    """The signal reaches the ranks at different times; at a snapshot all learn of it, and stop."""
    axes = sheet(4.9)
    told = {0: 2.3, 1: 4.1, 2: None, 3: 3.0}
    for rank, color in enumerate(RANKS):
        y = 3.4 - rank * 0.78
        say(axes, 0.95, y + 0.27, f"rank {rank}", SIZE, color, "right", weight="bold")
        for x in [1.1 + i * 0.63 for i in range(6)]:
            box(axes, x, y, 0.58, 0.56, "step", COMPUTE, size=SMALL)
        if told[rank]:
            box(axes, told[rank] - 0.06, y - 0.06, 0.12, 0.68, color=RANKS[1])
        box(axes, 6.6, y, 1.1, 0.56, "ends", PALE, size=SMALL)
    box(axes, 4.95, 1.06, 1.55, 2.9, "snapshot,\nall_reduce:\nhas any rank\na signal?\nyes", YELLOW,
        size=SMALL)  # fmt: skip
    say(axes, 2.9, 4.5, "USR1 reaches some ranks earlier,\none not at all", SIZE, RANKS[1])
    time_axis(axes, 1.1, 7.7, 0.5)
    return axes


def tested_once():
    """Ten images tested by four ranks: with DistributedSampler two of them count twice."""
    axes = sheet(4.4)
    for left, title, numbers, words in (
        (0.1, "DistributedSampler", [*range(10), 0, 1], "12 results: 0 and 1 count twice"),
        (4.1, "range(rank, 10, 4)", list(range(10)), "10 results: each once"),
    ):
        say(axes, left + 1.8, 4.1, title, SIZE, weight="bold", family=MONO)
        for rank, color in enumerate(RANKS):
            y = 2.95 - rank * 0.72
            say(axes, left + 0.8, y + 0.27, f"rank {rank}", SMALL, color, "right", weight="bold")
            for place, image in enumerate(numbers[rank::4]):
                again = rank + 4 * place >= 10
                face, edge, ink = (YELLOW, INK, INK) if again else (color, color, "white")
                x = left + 0.95 + place * 0.8
                box(axes, x, y, 0.72, 0.58, str(image), face, ink, ec=edge, lw=2.5)
        say(axes, left + 1.8, 0.3, words, SMALL)
    axes.plot([3.9, 3.9], [0.1, 4.3], color=LINE, lw=1.5)
    return axes


def gather_scatter():
    """The two collectives of FSDP: all-gather before a layer, reduce-scatter after it."""
    axes = sheet(5.2)
    for left, title, words in (
        (0.1, "all-gather", "every rank gets all the parts"),
        (4.05, "reduce-scatter", "every rank gets the mean\nof one part"),
    ):
        say(axes, left + 1.8, 4.9, title, 20, weight="bold")
        say(axes, left + 1.8, 0.4, words, SIZE)
        gather = title == "all-gather"
        for rank, color in enumerate(RANKS):
            y = 3.75 - rank * 0.85
            for part in range(4):
                for x, whole in ((left + 0.02, not gather), (left + 2.12, gather)):
                    there = whole or part == rank
                    mean = not gather and x > left + 1
                    face = "white" if not there else RANKS[part] if gather else color
                    edge = LINE if not there else face
                    label = "ABCD"[part] if there else ""
                    ink = "white" if there else INK
                    at = x + part * 0.385
                    if there and mean:  # of all ranks, so it has the colors of all
                        face = edge = "none"
                        for i, stripe in enumerate(RANKS):
                            corner = at + i * 0.0875, y
                            axes.add_patch(Rectangle(corner, 0.0875, 0.55, fc=stripe, lw=0))
                    box(axes, at, y, 0.35, 0.55, label, face, ink, SMALL, ec=edge)
            arrow(axes, (left + 1.62, y + 0.27), (left + 2.05, y + 0.27), lw=2)
            say(axes, left + 0.02, y + 0.72, f"rank {rank}", SMALL, color, "left", weight="bold")
    axes.plot([3.9, 3.9], [0.1, 5.1], color=LINE, lw=1.5)
    return axes


def sharded_measured():
    """What lesson 17 counted: MB that a rank holds, with DDP and with FSDP on N ranks."""
    data = take_shares()
    axes = plot(4.7)
    axes.set_position((0.2, 0.16, 0.77, 0.7))
    axes.grid(False)
    axes.grid(axis="x", color="#d5dae0")
    places = range(len(data))[::-1]
    labels = ["parameters", "gradients", "Adam's states"]
    for place, (*kept, inside) in zip(places, data.values()):
        left = 0
        for size, color, label in zip(kept, (COMPUTE, SEND, DONE), labels):
            name = label if place == len(data) - 1 else None
            axes.barh(place, size, left=left, height=0.55, color=color, label=name)
            left += size
        more = inside - kept[0]
        if more:
            name = "one whole layer" if place == len(data) - 2 else None
            options = {"fc": YELLOW, "ec": INK, "lw": 1, "label": name}
            axes.barh(place, more, left=left, height=0.55, **options)
        say(axes, left + more + 0.06, place, f"{left + more:.2f}", SIZE, ha="left")
    axes.set_yticks(places, list(data))
    axes.set_xlim(0, 4.6)
    axes.set_xticks(range(5))
    axes.set_ylim(-0.5, len(data) - 0.5)
    axes.set_xlabel("MB per rank, lesson 17's model", size=SIZE)
    axes.legend(
        fontsize=SMALL, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.27, 1.0),
        handlelength=1, columnspacing=1, handletextpad=0.4,
    )  # fmt: skip
    return axes


def slow_link():
    """What lesson 16 measured on slow links: how much of a step is sending, at the least."""
    data = take_ways()
    for way in ("local SGD 1", "local SGD 32"):  # as plain DDP; hardly anything
        del data[way]
    figure = Figure(figsize=(WIDTH, 5.3))
    for panel, (title, mbits) in enumerate((("100 Mbit/s", 100), ("1 Gbit/s", 1000))):
        axes = figure.add_axes((0.2, 0.515 - panel * 0.44, 0.76, 0.325))
        axes.tick_params(labelsize=SMALL, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        places = range(len(data))[::-1]
        longest = max(times[panel] for _, *times in data.values())
        for place, (sent, *times) in zip(places, data.values()):
            measured = times[panel]
            least = sent * 8e3 / mbits  # ms
            names = ("sending, at the least", "the rest") if place == len(data) - 1 else (None,) * 2
            axes.barh(place, least, height=0.65, color=SEND, label=names[0])
            axes.barh(place, measured - least, 0.65, left=least, color=COMPUTE, label=names[1])
            words = f"{measured:.1f} ms, sending {least:.1f}"
            inside = measured > 0.7 * longest
            at, ha = (0.01 * longest, "left") if inside else (measured + 0.015 * longest, "left")
            say(axes, at, place - 0.03, words, SMALL, ha=ha)
        axes.set_yticks(places, list(data))
        axes.set_xlim(0, 1.15 * longest)
        axes.set_ylim(-0.5, len(data) - 0.5)
        axes.set_xticks([i * 1e4 / mbits for i in range(4)])
        axes.set_title(title, size=SIZE, weight="bold", loc="left")
        if panel == 0:
            axes.legend(
                fontsize=SIZE, frameon=False, ncols=2, loc="lower left",
                bbox_to_anchor=(-0.05, 1.17), handlelength=1,
            )  # fmt: skip
    return axes


def second_node():
    """How many times as fast two and three nodes are on slow links: predicted and measured."""
    figure = Figure(figsize=(WIDTH, 6.2))
    axes = figure.add_axes((0.14, 0.13, 0.82, 0.72))
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    ticks = [0.01, 0.03, 0.1, 0.3, 1, 3]
    axes.plot([0.006, 4], [0.006, 4], color=GREY, lw=1.5, zorder=0)
    for at in (axes.axvline, axes.axhline):
        at(1, color=LINE, lw=1.5, ls="--", zorder=0)
    for (link, color), (nodes, marker) in itertools.product(
        zip((50, 200, 1000), RANKS), ((2, "o"), (3, "^"))
    ):
        points = [row[2:] for row in take_nodes() if row[:2] == [nodes, link]]
        label = f"{link} Mbit/s" if nodes == 2 else None
        axes.plot(*zip(*points), marker, ms=11, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlim=(0.006, 4), ylim=(0.006, 4))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel("times as fast as one node, predicted", size=SIZE)
    axes.set_ylabel("measured", size=SIZE)
    say(axes, 0.0075, 1.25, "faster than one node", SMALL, GREY, "left")
    say(axes, 0.0075, 0.8, "slower", SMALL, GREY, "left")
    axes.legend(
        fontsize=SIZE, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(-0.14, 1.0),
        handletextpad=0.1, columnspacing=0.8,
    )  # fmt: skip
    texts = ((0.019, "circle: 2 nodes"), (0.011, "triangle: 3 nodes"))
    for at, text in texts:
        say(axes, 0.12, at, text, SMALL, GREY, "left")
    return axes


# What figures take from the pages.
TAKEN = [take_messages, take_links, take_layouts, take_memory, take_ways, take_shares, take_nodes]
FIGURES = [
    course_map, why, processes, ring, ring_circle, bandwidth_1, shares_5, shares_profile,
    digits, loss_2, identical, sampler, data_parallel, timeline_by_hand, profiler, buckets,
    timeline_ddp, loss_6, speedup_7, warm_up, loss_8, loss_10, slurm, nodes, launchers, groups,
    skipped_collective, chunks, streaming, shuffle_buffer, restart, accumulation, shards,
    recommender, accelerate, powersgd, local_sgd, sharded, fsdp_time, messages_9, link_9,
    interfaces, layout_speed, memory_file, parallelism, whole_file, stop_together, tested_once,
    gather_scatter, sharded_measured, slow_link, step_time, second_node,
]  # fmt: skip


def check_text(figure, name):
    """End if a text is small, cut off, wider than its box, or over another text."""
    texts = []
    for text in figure.findobj(matplotlib.text.Text):
        if not (text.get_text().strip() and text.get_visible()):
            continue
        extent = text.get_window_extent()
        if text.get_size() < SMALL:
            sys.exit(f"{name}: {text.get_text()!r} is small.")
        frame = getattr(text, "inside", figure.patch).get_window_extent().padded(1)
        if not (frame.contains(*extent.min) and frame.contains(*extent.max)):
            sys.exit(f"{name}: {text.get_text()!r} does not fit.")
        texts.append((text.get_text(), extent.padded(-3)))
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        if a.overlaps(b):
            sys.exit(f"{name}: {one!r} and {other!r} overlap.")


def svg(axes, name, title, made_from):
    """Return the figure as SVG text; all of its words can be read."""
    figure = axes.figure
    figure.draw_without_rendering()
    check_text(figure, name)
    # As outlines, so that every machine shows the same letters. Nothing that differs by the run.
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": name})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure.svg")
        metadata = {"Date": None, "Title": title, "Description": f"made from {made_from}"}
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
    contents = [path.read_bytes() for path in inputs] + [printed(x).encode() for x in PRINTED]
    contents += [json.dumps(take()).encode() for take in TAKEN]
    made_from = hashlib.sha256(b"".join(contents)).hexdigest()
    stale = {path.name for path in HERE.glob("*.svg")} - {
        f"{draw.__name__}.svg" for draw in FIGURES
    }
    matplotlib.rcParams["font.sans-serif"] = FONTS
    for draw in FIGURES:
        path = HERE / f"{draw.__name__}.svg"
        if not args.check:
            title = draw.__doc__.splitlines()[0]
            path.write_text(svg(draw(), draw.__name__, title, made_from))
        # Another matplotlib may draw another curve: only what a figure is made from is compared.
        elif not path.exists() or made_from not in path.read_text():
            stale.add(path.name)
    if stale:
        print(f"Stale: {', '.join(sorted(stale))}. Run: python slides/figures/draw.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
