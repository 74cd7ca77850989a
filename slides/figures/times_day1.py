"""Figures of Day 1 that show how a rank spends its time."""

import re

from drawing import (
    COMPUTE,
    DONE,
    GREY,
    INK,
    LINE,
    RANKS,
    SEND,
    SENT,
    SIZE,
    SMALL,
    YELLOW,
    arrow,
    box,
    bracket,
    plot,
    say,
    sheet,
    time_axis,
    timeline_row,
)
from matplotlib.patches import Rectangle
from sources import measured, printed

# The bars of a trace: colours by a part of their name. The first that fits counts.
PARTS = {
    "ProfilerStep": "#d5dae0",
    "DataLoader": YELLOW,
    "aten::stack": YELLOW,
    "all_reduce": SEND,
    "allreduce": SEND,
    "Optimizer": DONE,
    "Backward": "#e6bfe0",
    "autograd": "#e6bfe0",
    "": COMPUTE,
}


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
    words = "one bar in the trace: all_reduce.\nWaiting counts as communication."
    say(axes, 5.03, 4.55, words, SIZE)
    say(axes, 2.55, 1.45, "slower", SMALL, GREY)
    bracket(axes, 4.16, 6.85, 1.6, -0.1)
    say(axes, 5.5, 1.2, "nothing is computed meanwhile", SMALL, GREY)
    time_axis(axes, 1.0, 7.7, 0.6)
    return axes


def trace_5():
    """What Perfetto shows of one step of lesson 5: two ranks, their threads, and its parts."""
    axes = sheet(5.95)
    ranks = measured("trace")["ranks"]
    left, height = 1.5, 0.36
    inch = 6.15 / max(begin + length for bars in ranks for _, begin, length, _ in bars)
    calls = [next(begin for row, begin, *_ in bars if row == "gloo") for bars in ranks]
    late = left + inch * max(calls)  # nothing can be sent before
    axes.plot([late] * 2, [0.7, 5.18], color=INK, lw=2, ls=":", zorder=0.5)
    tops = (4.82, 2.27)
    for rank, (bars, top) in enumerate(zip(ranks, tops)):
        say(axes, 0.1, top + 0.55, f"rank {rank}", SIZE, RANKS[rank], "left", weight="bold")
        say(axes, 0.1, top - height, "thread\npython", SMALL, GREY, "left")
        say(axes, 0.1, top - 1.26, "thread\ngloo", SMALL, GREY, "left")
        for row, begin, length, name in bars:
            x, width = left + inch * begin, max(inch * length, 0.015)
            y = top - (1.45 if row == "gloo" else height * row)
            color = next(color for part, color in PARTS.items() if part in name)
            bar = Rectangle((x, y), width, height - 0.03, fc=color, ec="white", lw=0.4)
            axes.add_patch(bar)
            if row in (0, 2) and width > 2:  # Perfetto shortens names, too
                words = name if len(name) < 17 else f"{name[:15]}…"
                say(axes, x + width / 2, y + 0.15, words, SMALL)
        x, y = left + inch * calls[rank], top - 1.45
        say(axes, x - 0.1, y + 0.15, "gloo:all_reduce", SMALL, SENT, "right")
    bars, top = ranks[0], tops[0]
    ends = {name: left + inch * (begin + length) for row, begin, length, name in bars if row == 1}
    first, data = left + inch * bars[0][1], next(iter(ends.values()))
    back = left + inch * next(begin for _, begin, _, name in bars if name.startswith("autograd"))
    done = max(end for name, end in ends.items() if name.startswith("autograd"))
    parts = ((first, data, "data"), (data, back, "forward"), (back, done, "backward"))
    bracket(axes, left + inch * bars[-1][1], 7.65, top + 0.48, color=GREY)
    say(axes, 7.72, top + 0.68, "step", SMALL, ha="right")
    for begin, stop, words in parts:
        bracket(axes, begin + 0.03, stop - 0.03, top + 0.48, color=GREY)
        say(axes, (begin + stop) / 2, top + 0.68, words, SMALL)
    waiting = calls.index(min(calls))
    early, top = left + inch * min(calls), tops[waiting]
    y = top - 1.45
    wait = Rectangle((early, y), late - early, height - 0.03, fc="none", hatch="//", ec=SENT)
    axes.add_patch(wait)
    say(axes, late - 0.08, y - 0.22, f"waits for rank {1 - waiting}", SMALL, SENT, "right")
    say(axes, late - 0.1, top - 0.2, "waits", SMALL, GREY, "right")
    for ms in range(0, 31, 10):
        x = left + inch * ms
        axes.plot([x, x], [0.62, 0.7], color=GREY, lw=1.5)
        say(axes, x, 0.42, f"{ms} ms", SMALL, GREY)
    axes.plot([left, 7.7], [0.66] * 2, color=GREY, lw=1.5)
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


def shares(lesson):
    """Draw the table that lesson 5 or test-profile printed as a bar a rank."""
    rows = re.findall(r"^ +(\d+)((?: +[\d.]+%){5})$", printed(lesson), re.M)
    axes = plot(4.9)
    axes.set_position((0.13, 0.16, 0.8, 0.56))
    axes.grid(False)
    names = ["data", "compute", "overlap", "communication", "idle"]
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
    return shares("5")


def shares_profile():
    """What test-profile printed: how each rank spends its time, with DDP."""
    return shares("test-profile")
