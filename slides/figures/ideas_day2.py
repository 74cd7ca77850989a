"""Figures of Day 2 that explain an idea."""

from drawing import (
    COMPUTE,
    DONE,
    GREY,
    INK,
    LINE,
    MONO,
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
)
from matplotlib.patches import Rectangle


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
            box(axes, 4.07, y, 2.4, 0.65, "continues without it", COMPUTE, size=SMALL)
            say(axes, 7.11, y + 0.32, "is stopped", SMALL, GREY)
            continue
        box(axes, 3.14, y, 3.35, 0.65, "waits for rank 2", "#fbe6d6", size=SMALL, ec=SENT)
        box(axes, 6.52, y, 1.18, 0.65, "error", "#a31515", "white", weight="bold")
    axes.plot([6.5] * 2, [1.2, 4.85], color="#a31515", lw=2.5, ls=":")
    say(axes, 6.95, 5.15, "timeout", SIZE, "#a31515", weight="bold")
    say(axes, 3.9, 0.93, "The error comes from the ranks that waited, not from rank 2.", SMALL)
    time_axis(axes, 1.0, 7.7, 0.5)
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
    say(axes, 3.9, 0.35, "simplified: 16 chunks; the file has 234", SMALL, GREY)
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
