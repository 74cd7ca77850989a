"""Measuring a case; its figures and ratios as text, as a plot and as files."""

import json
import os
import statistics
import sys
import textwrap
import time
from pathlib import Path

from course.colors import BLUE, GREEN, GREY, ORANGE, STYLE, shown, svg_of

OUTPUT = Path("runs", "benchmark")
ROUNDS = 7  # at most
CLEAR = "\r\033[K"  # takes away the line on a terminal


def busy_cores(seconds=0.5):
    """Return how many cores are busy while this process only waits; None if nobody says."""

    def idle():
        return sum(map(int, Path("/proc/stat").read_text().split()[4:6]))  # idle and iowait

    try:
        before, begin = idle(), time.monotonic()
        time.sleep(seconds)
        ticks = (time.monotonic() - begin) * os.sysconf("SC_CLK_TCK")
        return round(max(0, os.cpu_count() - (idle() - before) / ticks), 2)
    except (OSError, ValueError):
        return None


def spread(values):
    """Return raw values with their median and the lowest and the highest of them."""
    return {
        "values": values,
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }


def target(ratio):
    """Return what a ratio should be, in words; "" if nothing is aimed at."""
    for words, bound in (("at least", ratio.at_least), ("at most", ratio.at_most)):
        if bound is not None:
            return f"{words} {bound:g}"
    return ""


def summarise(case, figures):
    """Return the figures of a case, {name: [a value of each round]}, and its ratios, as a dict."""
    ratios = []
    for ratio in case.ratios:
        if ratio.over not in figures or (ratio.under and ratio.under not in figures):
            continue  # not measured on this machine
        values = figures[ratio.over]
        if ratio.under:
            values = [over / under for over, under in zip(values, figures[ratio.under])]
        result = {"what": ratio.what, "over": ratio.over, "under": ratio.under, **spread(values)}
        result |= {"target": target(ratio), "verdict": ""}
        if result["target"]:
            low = ratio.at_least is not None and result["median"] < ratio.at_least
            high = ratio.at_most is not None and result["median"] > ratio.at_most
            result["verdict"] = "missed" if low or high else "holds"
        ratios.append(result)
    return {
        "name": case.name,
        "title": case.title,
        "unit": case.unit,
        "axis": case.axis,
        "figures": {name: spread(values) for name, values in figures.items()},
        "ratios": ratios,
    }


def measure(case, folder, seconds, tiny):
    """Measure a case in a folder of its own. Return its summary; the cases tell what they raise."""
    began, begin = time.time(), time.monotonic()
    measurements, figures, busy = case.prepare(folder, tiny), {}, []
    for number in range(1, ROUNDS + 1):
        busy.append(busy_cores())
        start = time.monotonic()
        # Every second time in the other order: whoever comes first has no advantage.
        for function in measurements if number % 2 else measurements[::-1]:
            for name, value in function().items():
                figures.setdefault(name, []).append(value)
                if sys.stdout.isatty():
                    print(f"{CLEAR}   {name}: {shown(value)} {case.unit}", end="", flush=True)
        took, so_far = time.monotonic() - start, time.monotonic() - begin
        clear = CLEAR if sys.stdout.isatty() else ""
        print(f"{clear}   round {number}: {took:.0f} s", flush=True)
        if tiny or so_far + took > seconds:
            break
    result = summarise(case, figures)
    if case.say:
        result["says"] = case.say({name: x["median"] for name, x in result["figures"].items()})
    return result | {"began": began, "tiny": tiny, "busy cores before each round": busy}


def shown_range(x):
    """Return the lowest and the highest, "" if there is only one value."""
    return f"{shown(x['lowest'])} to {shown(x['highest'])}" if len(x["values"]) > 1 else ""


def print_case(result):
    """Print all figures and ratios of a case."""
    rows = [
        (name, f"{shown(x['median'])} {result['unit']}", shown_range(x), "")
        for name, x in result["figures"].items()
    ]
    rows += [
        (x["what"], shown(x["median"]), shown_range(x), f"{x['target']} {x['verdict']}")
        for x in result["ratios"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, median, values, rest in rows:
        line = f"   {name:<{widths[0]}}  {median:>{widths[1]}}  {values:<{widths[2]}}  {rest}"
        print(line.rstrip())
    if "says" in result:
        print(f"   {result['says']}")


def print_summary(results):
    """Print one Markdown table with the ratios of all cases."""
    facts = results[-1]["machine"]
    names = ("CPU", "memory", "accelerators", "Python", "torch", "torchvision", "h5py")
    where = "; ".join(f"{name} {facts[name]}" for name in names)
    print(f"\nRecorded until {facts['when']} with `{facts['command']}`: {where}.\n")
    print("| case | what | median | lowest to highest | rounds | target | |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        for x in result["ratios"]:
            cells = [f"`{result['name']}`", x["what"], shown(x["median"]), shown_range(x)]
            cells += [str(len(x["values"])), x["target"], x["verdict"]]
            print(f"| {' | '.join(cells)} |")


def draw(result):
    """Return a figure of a case: lines where it has an axis, else bars."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = {}  # {name: {place: figure}}
    for name, x in result["figures"].items():
        line, _, place = name.rpartition(": ")
        series.setdefault(line, {})[place] = x
    places = list(dict.fromkeys(place for line in series.values() for place in line))
    lines = bool(result["axis"])
    height = 3.3 if lines else 0.9 + 0.55 * len(places)
    drawing = Figure(figsize=(6.5, height))
    axes = drawing.subplots()
    for i, ((name, line), color) in enumerate(zip(series.items(), (BLUE, ORANGE, GREEN, GREY))):
        medians = [x["median"] for x in line.values()]
        errors = [[x["median"] - x["lowest"] for x in line.values()]]
        errors.append([x["highest"] - x["median"] for x in line.values()])
        at = [places.index(place) for place in line]
        if lines:
            axes.errorbar(at, medians, errors, fmt="o-", color=color, capsize=3, label=name)
        else:
            width = 0.8 / len(series)
            at = [x + width * (i - (len(series) - 1) / 2) for x in at]
            bars = axes.barh(at, medians, width, xerr=errors, color=color, label=name, capsize=3)
            texts = [f"{shown(x)} " for x in medians]
            axes.bar_label(bars, texts, padding=4)
    if lines:
        axes.set(xlabel=result["axis"], ylabel=result["unit"], xticks=range(len(places)))
        axes.set_xticklabels(places)
        medians = [x["median"] for x in result["figures"].values()]
        if max(medians) > 30 * min(medians):
            axes.set_yscale("log")
        else:
            axes.set_ylim(0)
            axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set(xlabel=result["unit"], yticks=range(len(places)))
        axes.set_yticklabels([textwrap.fill(place, 24) for place in places])
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.grid(visible=False, axis="y")
    if any(series):
        drawing.legend(loc="outside upper center", ncols=2)
    return drawing


def write(result):
    """Write a case's JSON file and its plot. Raises OSError if that is not possible."""
    from matplotlib import style

    OUTPUT.mkdir(parents=True, exist_ok=True)
    with style.context(["default", STYLE]):
        (OUTPUT / f"{result['name']}.svg").write_text(svg_of(draw(result)))
    (OUTPUT / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
