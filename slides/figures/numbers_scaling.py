"""Charts of lessons 14 to 17."""

import itertools

from drawing import (
    COMPUTE,
    DONE,
    GREY,
    INK,
    LINE,
    PALE,
    RANKS,
    SEND,
    SIZE,
    SMALL,
    WIDTH,
    YELLOW,
    box,
    plot,
    say,
    sheet,
)
from matplotlib.figure import Figure
from sources import take_nodes, take_shares, take_slots, take_ways


def sharded_measured():
    """What lesson 15 counted: MB that a rank holds, one process and N ranks with FSDP."""
    data = take_shares()
    axes = plot(4.0)
    axes.set_position((0.2, 0.19, 0.77, 0.66))
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
    axes.set_xlabel("MB per rank, lesson 15's model", size=SIZE)
    axes.legend(
        fontsize=SMALL, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.27, 1.0),
        handlelength=1, columnspacing=1, handletextpad=0.4,
    )  # fmt: skip
    return axes


def slow_link():
    """What lesson 14 measured on slow links: how much of a step is sending, at the least."""
    data = take_ways()
    del data["local SGD 32"]  # hardly anything
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
    figure = Figure(figsize=(WIDTH, 5.4))
    axes = figure.add_axes((0.14, 0.145, 0.82, 0.73))
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


def pipeline():
    """What lesson 17's stages did in a step: the slots of GPipe and of 1F1B, from its output."""
    axes = sheet(5.3)
    colors = {"F": COMPUTE, "B": SEND, ".": PALE}
    for top, (name, idle, held, rows) in zip((5.0, 2.6), take_slots()):
        words = f"{name}: {idle}% of slots idle; stage 0 holds {held} micro-batches"
        say(axes, 0.1, top, words, SMALL, ha="left", weight="bold")
        for stage, row in enumerate(rows):
            y = top - 0.68 - 0.42 * stage
            say(axes, 0.1, y + 0.18, f"stage {stage}", SMALL, GREY, "left")
            for slot, cell in enumerate(row):
                label = cell[1:].strip(".")
                box(axes, 1.05 + 0.303 * slot, y, 0.283, 0.37, label, colors[cell[0]], size=SMALL)
    for x, what, words in ((1.05, "F", "forward"), (3.0, "B", "backward"), (5.15, ".", "idle")):
        box(axes, x, 0.12, 0.36, 0.34, color=colors[what])
        say(axes, x + 0.46, 0.28, words, SIZE, ha="left")
    return axes
