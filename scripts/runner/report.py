"""Write the report of a run: what this machine did, in one page that opens without a network.

Called by run_course.py. Every number is from a lesson of this run. Nothing is drawn from a lesson
that failed.

A result is a dict: id, idea and figure of the lesson; what run_lesson returns; files, the paths of
the event files that the lesson wrote.
"""

import contextlib
import io
import re
import time
from pathlib import Path

import jinja2
from loss_curves import losses, thinned
from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from records import read_values, value
from runner.run_lesson import summary
from system_info import described

# Neither too light nor too dark, so that they can be seen on a white page and on a dark one.
BLUE, ORANGE, GREEN, GREY = "#2f86c9", "#d1690e", "#2b9a66", "#858f9b"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "figure.figsize": (3.6, 3.4),  # inches; small, so that letters are large on a telephone
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def svg_of(drawing, name):
    """Return a figure as SVG for a page that has several, in the page's own colour for text."""
    file = io.StringIO()
    drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue().replace("#000000", "currentColor")
    svg = svg[svg.index("<svg") :]
    # No id may be twice in a page.
    return Markup(re.sub(r'( id="|xlink:href="#|url\(#)', rf"\1{name}-", svg))


# Color and line width of each curve. Those that should be the same get narrower: all are seen.
STYLES = {
    "chain": [(GREY, 1.5), (ORANGE, 6), (GREEN, 3.5), (BLUE, 1.2)],
    "rates": [(BLUE, 1.5), (ORANGE, 1.5), (GREEN, 1.5)],
}


def curves(axes, results):
    """Draw loss curves over each other: of several lessons, or all those of lesson 8."""
    kind = results[0]["figure"]
    paths = {
        f"lesson {x['id']}" if kind == "chain" else y.parent.name: y
        for x in results
        for y in x["files"]
    }
    for (label, path), (color, width) in zip(paths.items(), STYLES[kind]):
        axes.plot(*thinned(losses(path), 40), color=color, label=label, linewidth=width)
    axes.set(xlabel="images seen", ylabel="training loss", yscale="log", xlim=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(NullLocator())
    if kind == "rates":
        return "The farther above one process's a curve is, the more its larger batch has cost."
    return "In a step, lesson 2 takes one batch, and the other lessons one for each rank."


# The titles of the figures, by the key figure of course.toml.
TITLES = {"chain": "One training, one process or several", "rates": "Loss and learning rate"}


def draw(well):
    """Return the figures of the lessons which ended well and wrote something, a list of dicts."""
    figures = []
    with style.context(["default", STYLE]):
        for kind, title in TITLES.items():
            sources = [x for x in well if x["figure"] == kind and x["files"]]
            if sources:
                drawing = Figure()
                caption = curves(drawing.subplots(), sources)
                drawing.legend(loc="outside upper left", ncols=2)
                svg = svg_of(drawing, kind)
                figures.append({"name": kind, "title": title, "caption": caption, "svg": svg})
    return figures


# Values that depend on the machine, by their names in values.toml, and their units. play.html reads
# how fast the ring is.
SPEEDS = {"images_per_s": "images/s", "bus_64_mb": "MB/s of 64 MB", "hidden": "hidden"}


def speeds(result, values):
    """Return how long a lesson took and how fast it was, a list of texts with units."""
    texts = [f"{result['seconds']:.1f} s"]
    for name, unit in SPEEDS.items():
        with contextlib.suppress(ValueError):  # it printed none
            found = value(values, f"{result['id']}.{name}", result["output"].splitlines())
            texts.append(f"{found} {unit}")
    return texts


def code(text):
    """Return a text as HTML, with the parts between backticks as code."""
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))


def write(path, results, command):
    """Write the page. Raise OSError if that is not possible.

    results: as above; command: what the user typed.
    """
    well = [x for x in results if not x["problem"] and not x["skipped"]]
    template = Path(__file__).with_name("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["code"] = code
    page = environment.from_string(template).render(
        results=[{**x, "speeds": speeds(x, read_values())} for x in results],
        summary=summary(results),
        figures=draw(well),
        here=f"{described()} ({time.strftime('%Y-%m-%d %H:%M')}, `{command}`)",
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(page, encoding="utf-8")
