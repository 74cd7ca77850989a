"""The boxes "In your own script" of the lessons' pages: changes to a usual script."""

import re

from helpers import ROOT

USUAL = ROOT / "tests" / "usual_script.py"


def section(text, heading):
    """Return what stands below a heading of a page."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def hunks(page):
    """Return the hunks of the boxes of a page: lists of lines as in a diff."""
    text = section((ROOT / page).read_text(), "In your own script")
    boxes = re.findall(r"```diff\n(.*?)```", text, re.S)
    return [x.splitlines() for box in boxes for x in re.split(r"^@@.*\n", box, flags=re.M)]


def changed(script, page):
    """Return a script after the changes that a page's box shows."""
    script = f"\n{script}"
    for lines in hunks(page):
        old = "\n".join(["", *(line[1:] for line in lines if line[:1] != "+"), ""])
        new = "\n".join(["", *(line[1:] for line in lines if line[:1] != "-"), ""])
        assert script.count(old) == 1, f"{script.count(old)} times: {old}"
        script = script.replace(old, new)
    return script[1:]
