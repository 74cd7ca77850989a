"""What the figures are drawn with: colours, sizes, boxes, arrows, and axes for charts."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Colours that colour-blind people can tell apart (Okabe and Ito), one a rank.
RANKS = ["#0072B2", "#C24E00", "#007A59", "#8F4A86"]
INK, GREY, PALE, YELLOW = "#16191d", "#4a5058", "#eef1f4", "#ffe08a"
COMPUTE, SEND = "#9cc9e8", "#f2b48c"
LINE, DONE, SENT = "#b8bec6", "#bfe6d2", "#8a4b1c"
LOST, ALARM = "#f3bcbc", "#a31515"  # what is gone, and what has gone wrong
WIDTH = 7.8  # inches. On a phone, 343 pixels: there a text of 17 points is 10 pixels high
SIZE = 18  # points
SMALL = 17  # no text is smaller
MONO = "DejaVu Sans Mono"


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


def timeline_row(axes, y, blocks, height=0.6):
    """Draw bars over the time: each has a begin, a width, a label and a colour."""
    for x, width, label, color in blocks:
        box(axes, x, y, width, height, label, color, size=SMALL)


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
