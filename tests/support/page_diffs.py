"""The changes that pages show as diffs, applied to a script."""

import re

REST = "-    ..."  # on the page of lesson 13: the rest of a function goes


def diffs_in(text):
    return re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)


def apply(diff, script):
    """Return a script after a diff, each hunk of which must fit at one place only."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = hunk.splitlines()
        old = [re.escape(f"{line[1:]}\n") for line in lines if line[:1] != "+"]
        old = "".join(old).replace(re.escape(f"{REST[1:]}\n"), "(?: {4}.*\n)+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        places = [place.span() for place in re.finditer(f"^{old}", script, re.M)]
        assert len(places) == 1, f"it fits at {len(places)} places:\n{hunk}"
        begin, end = places[0]
        script = script[:begin] + new + script[end:]
    return script
