"""Figures of lessons 12 to 20: jobs that restart, and other kinds of training."""

from drawing import (
    ALARM,
    COMPUTE,
    DONE,
    GREY,
    INK,
    LINE,
    LOST,
    MONO,
    PALE,
    RANKS,
    SEND,
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
    axes.add_patch(Rectangle((at(50), 3.55), 50 * step, 0.75, fc=LOST, ec="none"))
    say(axes, at(25), 3.91, "steps 1 to 50", SMALL, "white")
    say(axes, at(75), 3.91, "51 to 100: lost", SMALL)
    say(axes, at(75), 2.11, "51 to 100 again", SMALL, "white")
    for number in (50, 100, 150):
        y = 3.55 if number == 50 else 1.75
        axes.plot([at(number)] * 2, [y - 0.12, y + 0.87], color=INK, lw=4)
        say(axes, at(number), y + 1.07 if number == 50 else y - 0.32, "snapshot", SMALL)
    say(axes, at(100) + 0.15, 3.92, "a rank fails:\nall ranks are stopped", SIZE, ALARM, "left")
    arrow(axes, (at(50), 3.4), (at(50), 2.55))
    say(axes, at(50) + 0.15, 2.98, "loads the snapshot", SMALL, ha="left")
    arrow(axes, (at(165), 2.12), (7.72, 2.12), RANKS[2])
    say(axes, 3.9, 0.55, "Start 2 takes the steps that\nstart 1 would have taken.", SIZE)
    return axes


def whole_file():
    """A job is killed while it saves: what lies under the snapshot's name then."""
    axes = sheet(5.0)
    half = ("half a file", LOST)
    direct = {"snapshot.pt": half}
    renamed = {"snapshot.pt": ("the last snapshot", DONE), "snapshot.tmp": half}
    first = "written under a different name, then renamed"
    for top, title, files, result, color in (
        (4.72, "written under its own name", direct, "nothing to load", ALARM),
        (2.6, first, renamed, "loads the last one", RANKS[2]),
    ):
        say(axes, 0.1, top, title, SIZE, ha="left", weight="bold")
        for i, (name, (words, face)) in enumerate(files.items()):
            y = top - 0.95 - i * 0.75
            say(axes, 0.1, y + 0.3, name, SMALL, ha="left", family=MONO)
            width = 1.5 if "half" in words else 3.0
            box(axes, 1.95, y, width, 0.62, words, face, size=SMALL)
            if "half" in words:
                box(axes, 1.95, y, 3.0, 0.62, color="none", ec=GREY, ls="--")
        y = top - 0.95 - (len(files) - 1) * 0.375
        arrow(axes, (5.05, y + 0.3), (5.43, y + 0.3), color)
        say(axes, 6.6, y + 0.3, result, SIZE, color, weight="bold")
    axes.plot([3.45, 3.45], [0.55, 1.6], color=ALARM, lw=3)
    axes.plot([3.45, 3.45], [3.6, 4.5], color=ALARM, lw=3)
    say(axes, 3.45, 0.3, "killed here", SIZE, ALARM, weight="bold")
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
            box(axes, told[rank] - 0.06, y - 0.06, 0.12, 0.68, color=ALARM)
        box(axes, 6.6, y, 1.1, 0.56, "stops", PALE, size=SMALL)
    words = "snapshot,\nthen all ask:\nhas any rank\na signal?\nyes"
    box(axes, 4.95, 1.06, 1.55, 2.9, words, YELLOW, size=SMALL)
    say(axes, 2.9, 4.5, "USR1 reaches some ranks earlier,\none not at all", SIZE, ALARM)
    time_axis(axes, 1.1, 7.7, 0.5)
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
    words = "4 batches per rank, 1 message: the same step as one\nbatch that is 4 times as large"
    say(axes, 3.9, 0.45, words, SMALL, GREY)
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
    """Lesson 19: of a table's gradient only the rows that a batch has used are sent."""
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
    words = "Each rank gets the numbers and gradients of these\nrows, not of the whole table."
    say(axes, 3.9, 1.28, words, SIZE)
    words = (
        "What comes twice (here row 5) is added up.\n"
        "SparseAdam changes only these rows. Movies: a second table."
    )
    say(axes, 3.9, 0.45, words, SMALL, GREY)
    return axes


def accelerate():
    """What lesson 20 writes by hand and as calls of Accelerate, side by side."""
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
