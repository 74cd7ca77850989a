"""Collect the runs of scripts/sweep.sh: print one table, and draw one plot, runs/sweep/sweep.png.

Usage: python scripts/collect_sweep.py, in the folder where the sweep was started.
"""

import argparse
import re
import sys
from pathlib import Path

FOLDER = Path("runs", "sweep")
# A line of lesson 8: alone: global batch 8, learning rate 0.00125, mean loss 0.4574, test ...
RUN = re.compile(r"^(\w+): .*, mean loss (\S+), test accuracy (\S+)$", re.M)
GAPS = re.compile(r"^=> gap to the loss curve of one process: .*?(\S+%) \w+(?: \(limit.*)?$", re.M)


def read(folder):
    """Return {rate: (losses, accuracies, gap)} of the runs that have ended, by increasing rate.

    losses and accuracies: {way of lesson 8: as printed}. gap: that of the scaled rate, as printed.
    """
    runs = {}
    for file in folder.glob("lr-*/output.txt"):
        text = file.read_text()
        rate, gap = file.parent.name.removeprefix("lr-"), GAPS.search(text)
        if gap is None:
            print(f"{file}: this run has not ended, or has failed", file=sys.stderr)
            continue
        found = RUN.findall(text)
        losses = {way: loss for way, loss, _ in found}
        accuracies = {way: accuracy for way, _, accuracy in found}
        runs[rate] = losses, accuracies, gap[1]
    return {rate: runs[rate] for rate in sorted(runs, key=float)}


def table(runs):
    """Return the runs as a Markdown table."""
    ways = list(next(iter(runs.values()))[0])
    head = ["learning rate", *(f"{way}: loss" for way in ways)]
    head += [*(f"{way}: accuracy" for way in ways), f"{ways[-1]}: gap"]
    rows = [head, ["---:"] * len(head)]
    for rate, (losses, accuracies, gap) in runs.items():
        rows.append([rate, *losses.values(), *accuracies.values(), gap])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(runs, file):
    """Draw the mean loss over the learning rate, a line for each way of lesson 8."""
    from matplotlib.figure import Figure

    axes = Figure(layout="constrained").subplots()
    rates = [float(rate) for rate in runs]
    for way in next(iter(runs.values()))[0]:
        losses = [float(losses[way]) for losses, _, _ in runs.values()]
        axes.semilogx(rates, losses, marker="o", label=way)
    axes.set(xlabel="learning rate of one process", ylabel="mean training loss")
    axes.set_xticks(rates, list(runs))
    axes.minorticks_off()
    axes.legend()
    axes.figure.savefig(file)


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    runs = read(FOLDER)
    if not runs:
        sys.exit(f"There is no run in {FOLDER} that has ended. Start them: scripts/sweep.sh")
    print(table(runs))
    draw(runs, FOLDER / "sweep.png")
    print(f"\nPlot: {FOLDER / 'sweep.png'}")


if __name__ == "__main__":
    main()
