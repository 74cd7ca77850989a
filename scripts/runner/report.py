"""Write the report of a run: what the lessons showed, in one page that opens without a network.

Called by run_course.py. Every number was printed by a lesson of this run, or is in an event
file that the lesson wrote for TensorBoard. Nothing is drawn from a lesson that failed.

A result is a dict: id and idea of the lesson; command; output, showed, seconds, problem and skipped
as run_lesson.run returns them; events, the paths of the event files that the lesson wrote.
"""

import io
import re
from pathlib import Path

import jinja2
import numpy as np
from loss_curves import losses, thinned
from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from runner.run_lesson import summary
from system_info import facts

# Neither too light nor too dark, so that they can be seen on a white page and on a dark one.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f86c9", "#d1690e", "#2b9a66", "#9b6fc9", "#858f9b"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "figure.figsize": (4.4, 3.7),  # inches; small, so that letters are large on a telephone
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def find(pattern, result):
    """Return what the groups of a pattern match, for each such line that a lesson printed."""
    return re.findall(pattern, result["output"], re.MULTILINE)


def svg_of(drawing, name):
    """Return a figure as SVG for a page that has several, in the page's own colour for text."""
    file = io.StringIO()
    drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue().replace("#000000", "currentColor")
    svg = svg[svg.index("<svg") :]
    # No id may be twice in a page.
    return Markup(re.sub(r'( id="|xlink:href="#|url\(#)', rf"\1{name}-", svg))


def plain_ticks(axis):
    """Put plain numbers at 1, 2, 5, 10 and so on of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


# The color and the name of a curve of lesson 8, by the folder of its events.
CURVES = {
    "alone": (BLUE, "one process"),
    "unscaled": (ORANGE, "DDP, unscaled rate"),
    "linear": (GREEN, "DDP, linear rate"),
    "sqrt": (GREEN, "DDP, sqrt rate"),
}


def loss(axes, results):
    """Draw the loss curves of lesson 8."""
    for result in results:
        for path in result["events"]:
            color, label = CURVES[path.parent.name]
            axes.plot(*thinned(losses(path), 20), color=color, label=label)
    axes.set(xlabel="images seen", ylabel="training loss", yscale="log", xlim=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    plain_ticks(axes.yaxis)


def time_shares(axes, results):
    """Draw where the time of each rank went, as lesson 5 and test-profile print it."""
    row = r"^ *(\d+)" + r" +([\d.]+)%" * 5 + "$"
    rows = [(x["id"].removeprefix("test-"), *shares) for x in results for shares in find(row, x)]
    names = [f"{lesson}, rank {rank}" for lesson, rank, *_ in rows]
    shares = np.array([shares for _, _, *shares in rows], dtype=float).reshape(-1, 5)
    data, compute, communication, overlap, idle = shares.T
    parts = {  # what overlaps is printed with both, but is in the bar once
        "data": (data, PURPLE),
        "computing": (compute - overlap, BLUE),
        "both (overlap)": (overlap, GREEN),
        "communicating": (communication - overlap, ORANGE),
        "idle": (idle, GREY),
    }
    axes.figure.set_figheight(2 + 0.3 * len(rows))
    left = np.zeros(len(rows))
    for label, (share, color) in parts.items():
        bars = axes.barh(names, share, left=left, color=color, label=label)
        texts = [f"{x:.0f}" if x >= 7 else "" for x in share]
        axes.bar_label(bars, texts, label_type="center", color="#111111")
        left += share
    axes.set(xlabel="% of the time")
    axes.margins(x=0)
    axes.invert_yaxis()
    axes.grid(visible=False)


def bandwidth(axes, results):
    """Draw the bus bandwidth of all_reduce over the size, as lessons 1 and 9 print it."""
    pattern = r"^(?:(.*), (\d+) ranks, )? *(\d+ [kM]B): .* \(bus +([\d.,]+)\)$"
    series, sizes = {}, {}
    for result in results:
        for where, ranks, size, speed in find(pattern, result):
            # Lesson 1 names its ranks once, above.
            where = where or "all"
            ranks = ranks or find(r"^ranks: (\d+)", result)[0]
            count, unit = size.split()
            sizes[size] = int(count) * {"kB": 1e3, "MB": 1e6}[unit]
            points = series.setdefault(f"lesson {result['id']}: {where}, {ranks} ranks", [])
            points.append((sizes[size], float(speed.replace(",", ""))))
    for (label, points), color in zip(series.items(), (BLUE, GREEN, ORANGE)):
        axes.plot(*zip(*points), "o-", color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log", nonpositive="mask")  # a single rank has a bus bandwidth of 0
    axes.set(xlabel="size of the message", ylabel="bus bandwidth, MB/s")
    axes.set_xticks(list(sizes.values()), list(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    plain_ticks(axes.yaxis)


# The captions.
RATE = "The farther a curve is above one process's, the more its larger global batch has cost."
SHARES = """Lesson 5 sends its gradients after computing, but test-profile (profile) while
computing. A message costs no extra time only if its rank computes at the same time."""
COST = """Every message has a fixed cost. A small message costs little else, so only a large one
comes near what the connection can carry."""

# What is drawn: the function, the lessons that it is made from, the title and the caption.
FIGURES = [
    (loss, ("8",), "Loss and learning rate", RATE),
    (time_shares, ("5", "test-profile"), "Where the time goes", SHARES),
    (bandwidth, ("1", "9"), "Bandwidth of all_reduce", COST),
]


def draw(results):
    """Return the figures that the lessons which ended well have numbers for, a list of dicts."""
    well = {x["id"]: x for x in results if not x["problem"] and not x["skipped"]}
    figures = []
    with style.context(["default", STYLE]):
        for function, lessons, title, caption in FIGURES:
            sources = [well[lesson] for lesson in lessons if lesson in well]
            drawing = Figure()
            axes = drawing.subplots()
            if sources:
                function(axes, sources)
            if axes.get_legend_handles_labels()[0]:
                drawing.legend(loc="outside upper left", fontsize=9)
            if axes.has_data():
                name = function.__name__
                svg = svg_of(drawing, name)
                figures.append({"name": name, "title": title, "caption": caption, "svg": svg})
    return figures


def code(text):
    """Return a text as HTML, with the parts between backticks as code."""
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))


def write(path, results, command, began):
    """Write the page. Raise OSError if that is not possible.

    results: as above; command: what the user typed; began: when, in seconds as time.time().
    """
    template = Path(__file__).with_name("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["code"] = code
    page = environment.from_string(template).render(
        results=results,
        summary=summary(results),
        figures=draw(results),
        facts=facts(command, began),
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(page, encoding="utf-8")
