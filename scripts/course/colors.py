"""How figures look: the colors, the style, numbers as text, and a figure as the text of an SVG."""

import io

# Neither too light nor too dark, so that they can be seen on a white page and on a dark one.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f86c9", "#d1690e", "#2b9a66", "#9b6fc9", "#858f9b"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same numbers make the same page
    "figure.figsize": (4.4, 3.1),  # inches; small, so that letters are large on a telephone
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def shown(value):
    """Return a number with three digits, or without decimals where it is larger."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def svg_of(drawing):
    """Return the text of an SVG file; the same drawing gives the same text."""
    svg = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawing.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return svg.getvalue()
