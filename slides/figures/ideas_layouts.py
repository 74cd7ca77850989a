"""Figures of what ranks share: a text, a layer, experts; and what memory holds during a step."""

from drawing import (
    COMPUTE,
    DONE,
    GREY,
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
)
from matplotlib.patches import Polygon, Rectangle
from sources import measured

# Expert by expert, from which ranks tokens come: the first has most to do.
ARRIVED = [[0, 1, 1, 2, 3], [0, 2, 3], [0, 2], [1, 3]]


def zigzag():
    """A causal mask's pairs of tokens on four ranks: dealt out in order, and from both ends."""
    axes = sheet(6.4)
    side = 0.42
    ways = (("in order", lambda row: row // 2), ("from both ends", lambda row: min(row, 7 - row)))
    for left, (title, rank_of) in zip((0.1, 4.2), ways):
        say(axes, left + 1.7, 6.15, title, SIZE, weight="bold")
        pairs = [0] * 4
        for row in range(8):
            y = 5.3 - row * side
            for column in range(row + 1):
                x = left + column * side
                color = RANKS[rank_of(row)]
                if column == row:  # of a piece's own pairs, the mask leaves half
                    corners = [(x, y), (x, y + side), (x + side, y)]
                    axes.add_patch(Polygon(corners, fc=color, ec="white", lw=1.5))
                else:
                    axes.add_patch(Rectangle((x, y), side, side, fc=color, ec="white", lw=1.5))
                pairs[rank_of(row)] += 1 if column == row else 2
        for rank, count in enumerate(pairs):
            x = left + rank * 0.88
            box(axes, x, 1.5, 0.8, 0.5, f"{count // 2}", RANKS[rank])
        say(axes, left, 2.15, "squares to compute, by rank", SMALL, GREY, "left")
    say(axes, 1.75, 5.45, "a row: queries", SMALL, GREY, "left")
    say(axes, 1.75, 5.1, "of one piece", SMALL, GREY, "left")
    say(axes, 7.7, 5.45, "a column: keys", SMALL, GREY, "right")
    for rank in range(3):
        arrow(axes, (2.0 + rank * 1.4, 0.75), (2.5 + rank * 1.4, 0.75), SENT, lw=4)
    for rank, color in enumerate(RANKS):
        box(axes, 1.1 + rank * 1.4, 0.5, 0.9, 0.5, f"rank {rank}", color, size=SMALL)
    axes.plot([5.75, 5.75, 1.55, 1.55], [0.48, 0.3, 0.3, 0.35], color=SENT, lw=4)
    arrow(axes, (1.55, 0.3), (1.55, 0.5), SENT, lw=4, mutation_scale=14)
    say(axes, 6.4, 0.75, "keys and", SMALL, ha="left")
    say(axes, 6.4, 0.45, "values", SMALL, ha="left")
    say(axes, 3.9, 1.2, "dealt out from both ends, all ranks have equally much to do", SMALL)
    return axes


def experts():
    """Tokens travel to their experts on other ranks, and the answers back."""
    axes = sheet(6.0)
    for x, words in ((0.9, "tokens"), (3.9, "experts"), (6.9, "answers")):
        say(axes, x, 5.75, words, SIZE, weight="bold")
    for expert, ranks in enumerate(ARRIVED):
        y = 4.3 - expert * 1.2
        box(axes, 2.95, y, 1.9, 1.0, color=PALE, ec=LINE)
        say(axes, 3.9, y + 0.75, f"expert {expert}", SMALL)
        for i, rank in enumerate(ranks):
            box(axes, 3.05 + i * 0.35, y + 0.12, 0.3, 0.36, color=RANKS[rank])
        for rank in set(ranks):
            there = 4.8 - rank * 1.2
            for begin, end in (((1.75, there), (2.9, y + 0.5)), ((4.9, y + 0.5), (6.05, there))):
                arrow(axes, begin, end, RANKS[rank], lw=2, mutation_scale=14)
    for rank, color in enumerate(RANKS):
        y = 4.3 - rank * 1.2
        for x in (0.1, 6.1):
            say(axes, x + 0.8, y + 0.8, f"rank {rank}", SMALL, color, weight="bold")
            for i in range(3):
                box(axes, x + 0.25 + i * 0.37, y + 0.17, 0.32, 0.36, color=color)
    say(axes, 2.3, 0.32, "all_to_all", SMALL, SENT)
    say(axes, 5.5, 0.32, "all_to_all", SMALL, SENT)
    say(axes, 3.9, 0.32, "all wait", SMALL, GREY)
    return axes


def sequence():
    """Sequence parallel around a layer: shares of the positions, then of heads and columns."""
    axes = sheet(6.6)
    for rank, x in ((0, 0.1), (1, 4.0)):
        say(axes, x + 1.85, 6.35, f"rank {rank}", SIZE, RANKS[rank], weight="bold")
    half = ("first", "second")
    y = 5.4
    norm = ("norm", "positions")
    for words, parts in (norm, ("attention", "heads"), norm, ("MLP", "columns")):
        for rank, x in ((0, 0.1), (1, 4.0)):
            whole = parts != "positions"
            width = 3.7 if whole else 1.8
            at = x if whole or rank == 0 else x + 1.9
            label = f"{words}: {half[rank]} half\nof {parts}" if whole else words
            box(axes, at, y, width, 0.72, label, COMPUTE if whole else DONE, size=SMALL)
        if y > 1.2:
            words = "all-gather: now both have all positions" if parts == "positions" else ""
            words = words or "reduce-scatter: the sum, half of the positions each"
            box(axes, 0.1, y - 0.6, 7.6, 0.45, words, SEND, size=SMALL)
        y -= 1.42
    box(axes, 0.1, 0.5, 7.6, 0.45, "reduce-scatter", SEND, size=SMALL)
    say(axes, 3.9, 0.2, "green: half of the positions, so half of what is kept", SMALL, GREY)
    return axes


def memory_step():
    """What memory holds during a step: activations grow, gradients take their place. Measured."""
    axes = sheet(6.3)
    kept = measured("memory")
    left, bottom, width, height = 0.75, 1.6, 6.85, 4.1
    inch, high = width / kept["ends"]["step"], height / max(kept["all_mb"])
    x = [left + inch * ms for ms in kept["ms"]]
    model = bottom + high * kept["model_mb"]
    gradients = [model + high * mb for mb in kept["gradients_mb"]]
    everything = [bottom + high * mb for mb in kept["all_mb"]]
    options = {"step": "post", "ec": "white", "lw": 1}
    axes.fill_between([left, left + width], bottom, model, fc=COMPUTE)
    axes.fill_between(x, model, gradients, fc=DONE, **options)
    axes.fill_between(x, gradients, everything, fc=YELLOW, **options)
    say(axes, left + width / 2, (bottom + model) / 2, "parameters and Adam's states", SIZE)
    say(axes, 7.02, model + 0.19, "gradients", SMALL)
    say(axes, 2.6, model + 0.5, "activations", SIZE)
    peak = everything.index(max(everything))
    at, top = x[peak], everything[peak]
    say(axes, at + 0.6, top - 0.1, "the loss and its gradients", SMALL, ha="left")
    arrow(axes, (at + 0.55, top - 0.1), (at + 0.1, top - 0.2), lw=1.5)
    begin = left
    for words, ms in kept["ends"].items():
        stop = left + inch * ms
        bracket(axes, begin + 0.03, stop - 0.03, bottom - 0.12, -0.08, GREY)
        say(axes, (begin + stop) / 2, bottom - 0.38, words, SMALL)
        begin = stop
    for mb in range(0, int(max(kept["all_mb"])) + 1, 50):
        y = bottom + high * mb
        axes.plot([left - 0.1, left], [y, y], color=GREY, lw=1.5)
        say(axes, left - 0.15, y, str(mb), SMALL, GREY, "right")
    axes.plot([left, left], [bottom, bottom + height], color=GREY, lw=1.5)
    say(axes, 0.1, 6.0, "MB", SMALL, GREY, "left")
    size = kept["model_mb"] / 12  # bytes a parameter, with Adam's states
    words = f"measured on a CPU: {size:.1f} million parameters,\n"
    words += f"{kept['tokens']:,} tokens, a vocabulary of {kept['vocabulary']:,}"
    say(axes, left + width / 2, 0.55, words, SMALL, GREY)
    return axes
