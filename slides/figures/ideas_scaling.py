"""Figures of lessons 14 to 16: slow networks, and models that do not fit."""

# ruff: noqa: RUF001 (a figure may say × and −)
from drawing import (
    COMPUTE,
    DONE,
    GREY,
    INK,
    LINE,
    PALE,
    RANKS,
    SEND,
    SENT,
    SIZE,
    SMALL,
    YELLOW,
    arrow,
    box,
    bracket,
    say,
    sheet,
    time_axis,
    timeline_row,
)
from matplotlib.patches import Rectangle


def powersgd():
    """PowerSGD: two thin matrices are sent in place of a gradient; the error is kept."""
    n, m, r = 1536, 512, 8  # lesson 14's layer fc1 and its MATRIX_RANK
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
    words = (
        "The error is added to the gradient of the next step:\nwhat is left out now is sent later."
    )
    say(axes, 3.9, 0.8, words, SIZE)
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
    """One rank of lesson 15 over the time: what it gathers, computes, frees and sends."""
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
    words = "gather: all_gather of parameters, before they are needed"
    say(axes, 0.1, 1.35, words, SMALL, ha="left")
    say(axes, 0.1, 1.02, "scatter: reduce_scatter, the mean of the gradients", SMALL, ha="left")
    say(axes, 0.1, 5.38, "one rank, a model of two layers", SMALL, GREY, "left")
    time_axis(axes, left, 7.7, 0.55)
    return axes


def column_row():
    """Two linear layers on two ranks: columns of the first matrix, rows of the second."""
    axes = sheet(6.3)

    def matrix(x, y, width, height, label="", color=PALE):
        axes.add_patch(Rectangle((x, y), width, height, fc=color, ec="white", lw=1.5))
        ink = "white" if color in RANKS else INK
        say(axes, x + width / 2, y + height / 2, label, SIZE, ink)

    blue, orange = RANKS[:2]
    say(axes, 0.1, 6.05, "column-wise: some outputs, each complete", SIZE, ha="left", weight="bold")
    matrix(0.3, 4.1, 1.2, 1.2, "x, on\nboth")
    say(axes, 1.75, 4.7, "×", 26)
    for x, color in ((2.0, blue), (3.15, orange)):
        matrix(x, 4.1, 1.15, 1.2, "", color)
    say(axes, 3.15, 5.52, "up", SIZE)
    say(axes, 4.6, 4.7, "=", 26)
    for x, color in ((4.9, blue), (6.05, orange)):
        matrix(x, 4.1, 1.15, 1.2, "", color)
    say(axes, 6.05, 5.52, "y", SIZE)
    for x, rank in ((2.57, 0), (3.72, 1), (5.47, 0), (6.62, 1)):
        say(axes, x, 4.7, f"rank {rank}", SMALL, "white")
    words = "no message: the y that a rank has is the y that it needs"
    say(axes, 7.2, 3.86, words, SMALL, GREY, "right")
    say(axes, 0.1, 3.4, "row-wise: a part of every output", SIZE, ha="left", weight="bold")
    for x, rank in ((0.1, 0), (0.95, 1)):
        matrix(x, 1.45, 0.85, 1.2, f"rank {rank}", RANKS[rank])
    say(axes, 0.95, 2.85, "y", SIZE)
    say(axes, 2.03, 2.05, "×", 26)
    for y, color, rank in ((2.05, blue, 0), (1.2, orange, 1)):
        matrix(2.25, y, 1.2, 0.85, f"rank {rank}", color)
    say(axes, 2.85, 3.07, "down", SIZE)
    say(axes, 3.68, 2.05, "=", 26)
    matrix(3.9, 1.45, 1.2, 1.2, "rank 0", blue)
    say(axes, 5.3, 2.05, "+", 26)
    matrix(5.5, 1.45, 1.2, 1.2, "rank 1", orange)
    bracket(axes, 3.9, 6.7, 1.25, -0.1)
    arrow(axes, (5.3, 1.22), (5.3, 0.85), SENT, lw=3)
    box(axes, 3.4, 0.25, 3.8, 0.58, "all_reduce: the sum, on both", SEND)
    say(axes, 3.25, 0.54, "then add the bias, once", SMALL, GREY, "right")
    return axes


def mesh():
    """A mesh of 2 x 2 ranks: a tensor group inside each node, a data group for each half."""
    axes = sheet(5.4)
    for row, y in ((0, 3.1), (1, 0.75)):
        box(axes, 1.5, y, 5.0, 1.45, color="white", ec=LINE)
        say(axes, 0.1, y + 0.72, f"node {row}:\ntensor\ngroup {row}", SMALL, GREY, "left")
        for column, x in ((0, 1.75), (1, 4.55)):
            rank = 2 * row + column
            label = f"rank {rank}\n{('first', 'second')[column]} half"
            box(axes, x, y + 0.25, 1.7, 0.95, label, RANKS[column])
        arrow(axes, (3.5, y + 0.72), (4.5, y + 0.72), SENT, "<|-|>", lw=5)
    for column, x in ((0, 2.6), (1, 5.4)):
        say(axes, x, 4.8, f"data group {column}", SMALL, GREY)
        arrow(axes, (x, 1.97), (x, 3.33), SENT, "<|-|>", lw=2)
    say(axes, 4.0, 5.2, "each half of every layer is there twice", SIZE, weight="bold")
    say(axes, 4.0, 2.65, "gradients:\nonce a step", SMALL)
    say(axes, 4.0, 0.35, "thick: activations, four times a layer in every step", SMALL)
    return axes


def grid():
    """Eight ranks as a grid: a stage in each node, in it two context ranks of two tensor ranks."""
    axes = sheet(6.0, 7.9)
    for stage, x in ((0, 0.1), (1, 4.4)):
        box(axes, x, 1.1, 3.4, 3.9, color="white", ec=LINE)
        say(axes, x + 1.7, 5.35, f"node {stage}: stage {stage}", SIZE, weight="bold")
        for context, y in ((0, 3.45), (1, 1.4)):
            for tensor, left in ((0, x + 0.2), (1, x + 2.0)):
                rank = 4 * stage + 2 * context + tensor
                box(axes, left, y, 1.2, 1.2, f"rank {rank}", RANKS[2 * context + tensor])
            arrow(axes, (x + 1.42, y + 0.6), (x + 1.98, y + 0.6), SENT, "<|-|>", lw=6)
        for left in (x + 0.8, x + 2.6):
            arrow(axes, (left, 2.62), (left, 3.43), SENT, "<|-|>", lw=4)
        say(axes, x + 1.7, 3.02, "context, data", SMALL)
        say(axes, x + 1.7, 4.82, "tensor", SMALL)
    for y in (4.05, 2.0):
        arrow(axes, (3.52, y), (4.38, y), SENT, "<|-|>", lw=2)
    say(axes, 3.95, 0.75, "pipeline: from a rank to the same place in the other node", SMALL)
    say(axes, 3.95, 0.3, "the thicker, the more is sent", SMALL, GREY)
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
                            axes.add_patch(Rectangle(corner, 0.0875, 0.48, fc=stripe, lw=0))
                    box(axes, at, y, 0.35, 0.48, label, face, ink, SMALL, ec=edge)
            arrow(axes, (left + 1.62, y + 0.24), (left + 2.05, y + 0.24), lw=2)
            say(axes, left + 0.02, y + 0.67, f"rank {rank}", SMALL, color, "left", weight="bold")
    axes.plot([3.9, 3.9], [0.1, 5.1], color=LINE, lw=1.5)
    return axes


def parallelism():
    """Which parallelism: what to ask of a training step, and what the answer leads to."""
    axes = sheet(6.7)
    words = "First: bf16, small micro-batches, activation checkpointing"
    box(axes, 0.1, 6.15, 7.6, 0.5, words, PALE, size=SMALL)
    questions = [
        (4.75, "Does a step fit into one\nGPU? Adam: 16 bytes a\nparameter, and activations"),
        (2.85, "Do parts fit, and a\nwhole layer, and all\nactivations of a text?"),
        (1.2, "What is too large,\nor too slow?"),
    ]
    answers = [
        (5.55, "fast enough: one GPU", PALE),
        (4.97, "too slow: DDP (lesson 6)", DONE),
        (4.39, "and slow link: lesson 14", DONE),
        (3.7, "8 + 8 / ranks fit: ZeRO-1", DONE),
        (3.12, "16 / ranks: FSDP (lesson 15)", DONE),
        (2.54, "and slow link: hybrid, HSDP", DONE),
        (1.85, "layer: tensor (lesson 16)", YELLOW),
        (1.27, "link: pipeline (lesson 17)", YELLOW),
        (0.69, "text: ring (exercise 15.4)", YELLOW),
    ]
    for y, words in questions:
        box(axes, 0.1, y, 3.2, 1.2 if words.count("\n") > 1 else 0.95, words, COMPUTE, size=SMALL)
    for y, words, color in answers:
        box(axes, 4.2, y, 3.5, 0.5, words, color)
    for start, end, word in (
        (5.45, 5.8, "yes"),
        (5.45, 5.22, ""),
        (3.5, 3.95, "yes"),
        (3.5, 3.37, ""),
        (1.67, 2.1, ""),
        (1.67, 1.52, ""),
        (1.67, 0.94, ""),
    ):
        arrow(axes, (3.35, start), (4.15, end), lw=2)
        if word:
            say(axes, 3.7, max(start, end) + 0.1, word, SMALL, GREY)
    arrow(axes, (1.7, 6.13), (1.7, 5.97))
    for y in (4.97, 3.12):  # from a way to the one that sends less
        arrow(axes, (5.95, y), (5.95, y - 0.08), lw=2, mutation_scale=14)
    for begin, end in ((4.73, 4.07), (2.83, 2.17)):
        arrow(axes, (1.7, begin), (1.7, end))
        say(axes, 2.0, (begin + end) / 2, "no", SMALL, GREY)
    words = "A model of experts: they go on different ranks (exercise 21.1)"
    box(axes, 0.1, 0.1, 7.6, 0.45, words, YELLOW, size=SMALL)
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
