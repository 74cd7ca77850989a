"""Draw the figures of the slides, as SVG files beside this one.

A figure is a function without arguments in one of the modules ideas_*, times_* and numbers_*, and
has the name of that function. Charts are drawn from what lessons printed, and from their curves, in
the record (python scripts/update_docs.py --record), or from tables of the pages. The other figures
explain an idea and show nothing measured.

Usage: slides/figures/draw.py [NAME...]            draw all figures, or these
       slides/figures/draw.py --check [NAME...]    change nothing; exit status 1 if one is stale

A figure is stale if it would be drawn in another way. Letters are drawn as outlines, so that every
machine shows the same ones. Another version of matplotlib, Pillow or the font draws other
outlines: --check then says so, and does not compare the figure. The picture that moves is written
as it is, with words.
"""

import argparse
import inspect
import io
import itertools
import re
import sys
from pathlib import Path

import ideas_day1
import ideas_day2
import ideas_jobs
import ideas_layouts
import ideas_scaling
import matplotlib
import moving
import numbers_day1
import numbers_day2
import numbers_scaling
import PIL
import times_day1
from drawing import SMALL
from matplotlib import font_manager

HERE = Path(__file__).resolve().parent
# The first that is there. The three have the same widths; the slides have them, too.
FONTS = ["Liberation Sans", "Arial", "Helvetica", "DejaVu Sans"]
MODULES = [
    ideas_day1,
    times_day1,
    numbers_day1,
    ideas_day2,
    numbers_day2,
    ideas_jobs,
    ideas_layouts,
    ideas_scaling,
    numbers_scaling,
    moving,
]


def all_figures():
    """Return {name: function} for all figures."""
    functions = {}
    for module in MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            here = function.__module__ == module.__name__
            if here and not inspect.signature(function).parameters:
                functions[name] = function
    return functions


def tools():
    """Return what decides how outlines and pictures are written: the versions, and the font's."""
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    version = font.get_sfnt()[1, 0, 0, 5].decode("latin-1").removeprefix("Version ")
    libraries = f"matplotlib {matplotlib.__version__}, Pillow {PIL.__version__}"
    return f"{libraries}, {font.family_name} {version}"


def check_text(figure, name):
    """End if a text is small, cut off, wider than its box, or over another text."""
    texts = []
    for text in figure.findobj(matplotlib.text.Text):
        if not (text.get_text().strip() and text.get_visible()):
            continue
        extent = text.get_window_extent()
        if text.get_size() < SMALL:
            sys.exit(f"{name}: {text.get_text()!r} is small.")
        frame = getattr(text, "inside", figure.patch).get_window_extent().padded(1)
        if not (frame.contains(*extent.min) and frame.contains(*extent.max)):
            sys.exit(f"{name}: {text.get_text()!r} does not fit.")
        texts.append((text.get_text(), extent.padded(-3)))
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        if a.overlaps(b):
            sys.exit(f"{name}: {one!r} and {other!r} overlap.")


def svg(draw):
    """Return the figure that a function draws as SVG text; all of its words can be read."""
    name = draw.__name__
    drawn = draw()
    if isinstance(drawn, str):  # SVG already
        return drawn
    figure = drawn.figure
    figure.draw_without_rendering()
    check_text(figure, name)
    # As outlines, so that every machine shows the same letters. Nothing that differs by the run.
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": name})
    title = draw.__doc__.splitlines()[0]
    text = io.StringIO()
    metadata = {"Date": None, "Title": title, "Description": f"drawn with {tools()}"}
    figure.savefig(text, format="svg", metadata=metadata)
    return re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.M)


def compare(figures):
    """Say which figures would be drawn in another way, or have no function. Return the number."""
    stale = {path.stem for path in HERE.glob("*.svg")} - set(all_figures())
    others = []
    for name, draw in figures.items():
        path = HERE / f"{name}.svg"
        committed = path.read_text() if path.exists() else ""
        if "drawn with" in committed and f"drawn with {tools()}<" not in committed:
            others.append(name)
        elif committed != svg(draw):
            stale.add(name)
    if others:
        print(f"Not compared, because this machine has {tools()}: {', '.join(others)}")
    if stale:
        print(f"Stale: {', '.join(sorted(stale))}. Run: python slides/figures/draw.py")
    return len(stale)


def main():
    """Draw or check; return the exit status."""
    figures = all_figures()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these figures")
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    args = parser.parse_args()
    unknown = ", ".join(sorted(set(args.names) - set(figures)))
    if unknown:
        sys.exit(f"There is no figure {unknown}. There are: {', '.join(sorted(figures))}")
    if args.names:
        figures = {name: figures[name] for name in args.names}
    matplotlib.rcParams["font.sans-serif"] = FONTS
    if args.check:
        return int(compare(figures) > 0)
    for name, draw in figures.items():
        (HERE / f"{name}.svg").write_text(svg(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
