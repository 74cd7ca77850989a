"""Figures of Day 1 that explain an idea, and the map of all lessons."""

# ruff: noqa: RUF001 (a figure may say × and −)
import sys

from drawing import (
    DONE,
    GREY,
    LINE,
    PALE,
    RANKS,
    SIZE,
    SMALL,
    YELLOW,
    arrow,
    box,
    bracket,
    say,
    sheet,
)
from matplotlib.patches import Circle, Rectangle
from sources import COURSE, take_parents, take_samples, take_short_ways

SAME = {int(x["id"]) for x in COURSE.lessons.values() if x.get("figure") == "chain"}
HOME = {19: "recommender", 20: "Accelerate"}  # in no timetable


def station(axes, number, x, y, color, radius=0.29):
    """Draw a station of the map: green if it's one of the lessons with the same losses."""
    same = number in SAME
    face, edge = (RANKS[2], RANKS[2]) if same else ("white", color)
    axes.add_patch(Circle((x, y), radius, fc=face, ec=edge, lw=3))
    say(axes, x, y - 0.01, str(number), SIZE, "white" if same else color, weight="bold")


def course_map():
    """The lessons as a path, in the order of the timetable, and short ways through them."""
    axes = sheet(7.05, 9.3)
    days = {"day1": RANKS[0], "day2": RANKS[1], "beyond": RANKS[3]}
    names = {}  # {number: (day, what it's called)}, in the order in which they are taught
    for day in days:
        for part in COURSE.days[day]["parts"]:
            if part.get("page", "").isdigit():
                names[int(part["page"])] = (day, part.get("strip") or part["topic"])
    needs = {child: parent for parent, child in take_parents()}
    if strange := set(needs) ^ (set(names) | set(HOME)) - {0}:
        sys.exit(f"course_map: in no timetable, and not in HOME: {sorted(strange)}")
    rows = [6.15, 4.75, 3.07, 1.6]
    places = []
    for i in range(len(names)):
        column = i % 6 if i // 6 % 2 == 0 else 5 - i % 6  # every other row goes back
        places.append((0.98 + 1.47 * column, rows[i // 6]))
    before = None
    for (number, (day, name)), (x, y) in zip(names.items(), places):
        color = days[day]
        line = {"color": color, "lw": 6, "mutation_scale": 26}
        if before:
            last, from_x, from_y = before
            way = 1 if x > from_x else -1
            if y == from_y:
                arrow(axes, (from_x + 0.3 * way, y), (x - 0.31 * way, y), **line)
            else:  # around the end of the row
                way = 1 if x > 4.6 else -1
                turn = f"arc3,rad={-0.62 * way}"
                begin, to = (x + 0.31 * way, from_y), (x + 0.31 * way, y)
                arrow(axes, begin, to, connectionstyle=turn, **line)
        station(axes, number, x, y, color)
        say(axes, x, y - 0.49, name, SMALL)
        if before and needs[number] != last:
            say(axes, x, y - 0.77, f"needs {needs[number]}", SMALL, GREY)
        before = number, x, y
    title = {"ha": "left", "weight": "bold", "size": 19}
    say(axes, 0.3, 6.77, "Day 1: one node", color=days["day1"], **title)
    ends_at_9 = {**title, "ha": "right"}  # where the day begins: this row is read backwards
    say(axes, 4.4, 5.3, "Day 2: many nodes", color=days["day2"], **ends_at_9)
    say(axes, 0.75, 3.65, "A third day, to choose from", color=days["beyond"], **title)
    words = "green: the same training"
    say(axes, 9.0, 6.77, words, SMALL, RANKS[2], "right", weight="bold")
    say(axes, 8.75, 5.3, "no label: needs the one before", SMALL, GREY, "right")
    words = "needs 10: come straight from 10"
    say(axes, 9.0, 3.65, words, SMALL, days["beyond"], "right", weight="bold")
    for y, (words, numbers) in zip((1.7, 1.15), take_short_ways().items()):
        say(axes, 0.3, y, words, SMALL, ha="left")
        xs = [2.6 + 0.54 * i for i in range(len(numbers))]
        axes.plot((xs[0], xs[-1]), (y, y), color=LINE, lw=4, zorder=0.5)
        for number, x in zip(numbers, xs):
            station(axes, number, x, y, days[names[number][0]], 0.22)
    say(axes, 0.3, 0.5, "reading at home", SMALL, ha="left")
    for (number, name), x in zip(HOME.items(), (2.58, 4.78)):
        station(axes, number, x, 0.5, GREY, 0.24)
        say(axes, x + 0.33, 0.5, f"{name}\nneeds {needs[number]}", SMALL, ha="left")
    return axes


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
    words = "With n ranks: 2 (n − 1) / n times, always less than 2."
    say(axes, 3.9, 0.36, words, SIZE, weight="bold")
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
    say(axes, 5.95, 0.52, "4 × 15,000 images per epoch:\neach image once")
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
    epochs = take_samples(16, 4)
    axes = sheet(4.7)
    for epoch, ranks in enumerate(epochs):
        y = 3.15 - epoch * 0.8
        say(axes, 0.95, y + 0.28, f"epoch {epoch}", SIZE, ha="right")
        row = [ranks[i % 4][i // 4] for i in range(16)]
        for i, image in enumerate(row):
            box(axes, 1.05 + i * 0.417, y, 0.38, 0.6, str(image), RANKS[i % 4], size=SMALL)
    words = "16 images: shuffled in the same way on every rank,\nthen dealt out like cards"
    say(axes, 3.9, 4.28, words, SIZE)
    for rank, images in enumerate(epochs[0]):
        x = 0.1 + rank * 1.92
        numbers = ", ".join(map(str, images))
        words = f"rank {rank}\nin epoch 0:\n{numbers}"
        box(axes, x, 0.25, 1.84, 1.6, words, RANKS[rank], size=SMALL)
    return axes
