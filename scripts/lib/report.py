"""Write the report of a run: what the lessons showed, in one page that opens without a network.

Called by run_course.py. Every number was printed by a lesson of this run, or stands in an event
file that the lesson wrote for TensorBoard. Nothing is drawn from a lesson that failed.

What benchmark.py has left in runs/benchmark/ is shown too, with its own date and machine.

A result is a dict: id and idea of the lesson; command; output, showed, seconds, problem and skipped
as run_course.run returns them; events, the paths of the event files that the lesson wrote.
"""

import json
import re
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lib.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE, shown, svg_of
from lib.machine import facts


def find(pattern, results):
    """Return what the groups of a pattern match, for each such line that the lessons printed."""
    return [row for x in results for row in re.findall(pattern, x["output"], re.MULTILINE)]


def number(text):
    """Return the number that a lesson printed with a comma after the thousands."""
    return float(text.replace(",", ""))


def figure(name, title, caption, results, drawing, head, rows):
    """Return what the page needs for a figure that is drawn from what lessons printed."""
    commands = [result["command"] for result in results]
    return card(name, title, caption, commands, svg_of(drawing), head, rows)


def card(name, title, caption, commands, svg, head, rows):
    """Return what the page needs for a figure; head and rows are a table of its numbers."""
    # The page's own colour for lines and text, and no id twice in a page of several figures.
    svg = svg.replace("#000000", "currentColor")
    svg = re.sub(r'( id="|xlink:href="#|url\(#)', rf"\1{name}-", svg[svg.index("<svg") :])
    return {
        "name": name,
        "title": title,
        "caption": caption,
        "commands": commands,
        "svg": Markup(svg),
        "head": head,
        "rows": rows,
    }


def plain_ticks(axis):
    """Put plain numbers at 1, 2, 5, 10 and so on of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def loss_curve(path, points=20):
    """Return images seen and mean loss since the point before, [points] each, from an event file.

    As in lesson 8, a point stands for many steps, because a single batch is noisy. None if the file
    has no loss.
    """
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    if "loss/train" not in events.Tags()["scalars"]:
        return None
    seen, losses = np.array([(e.step, e.value) for e in events.Scalars("loss/train")]).T
    images = np.diff(seen, prepend=0)
    points = min(points, len(seen))
    sums = [[x.sum() for x in np.array_split(part, points)] for part in (losses * images, images)]
    return np.cumsum(sums[1]), np.divide(*sums)


# The color and the name of a curve, by the folder of its events or else by the lesson.
CURVES = {
    "2": (BLUE, "one process"),
    "6": (ORANGE, "DDP"),
    "alone": (BLUE, "one process"),
    "unscaled": (ORANGE, "DDP, unscaled rate"),
    "linear": (GREEN, "DDP, linear rate"),
    "sqrt": (GREEN, "DDP, sqrt rate"),
}


def draw_loss(name, title, results):
    """Draw the loss curves that these lessons wrote."""
    drawing = Figure()
    axes, rows = drawing.subplots(), []
    for result in results:
        for path in result["events"]:
            if (curve := loss_curve(path)) is None:
                continue
            kind = path.parent.name if path.parent.name in CURVES else result["id"]
            color, label = CURVES[kind]
            label = f"lesson {result['id']}: {label}"
            images, losses = curve
            axes.plot(images, losses, label=label, color=color)
            mean = np.average(losses, weights=np.diff(images, prepend=0))
            rows.append((label, *(f"{x:.4f}" for x in (losses[0], mean, losses[-1]))))
    if not rows:
        return None
    axes.set(xlabel="images seen", ylabel="training loss", yscale="log", xlim=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    plain_ticks(axes.yaxis)
    axes.legend()
    caption = (
        "The farther a curve lies above that of one process, the more its larger global batch has "
        "cost."
    )
    head = ("curve", "first point", "mean loss", "last point")
    return figure(name, title, caption, results, drawing, head, rows)


def draw_speed_up(name, title, results):
    """Draw the images/s of several processes over those of one, as lesson 7 prints them."""
    rows = find(r"^processes: (\d+), .*, ([\d,]+) images/s$", results)
    if len(rows) < 2:
        return None
    processes, speeds = [int(n) for n, _ in rows], np.array([number(speed) for _, speed in rows])
    gains, most = speeds / speeds[0], processes[-1]
    drawing = Figure()
    axes = drawing.subplots()
    axes.plot([1, most], [1, most], "--", color=GREY, label="ideal")
    axes.plot(processes, gains, "o-", color=BLUE, label="measured")
    for n, gain in zip(processes, gains):
        axes.annotate(
            f"{gain:.2f}", (n, gain), (0, -8), textcoords="offset points", ha="center", va="top"
        )
    axes.margins(0.15, 0.2)
    axes.set(xlabel="processes", ylabel="speed-up", xticks=processes, ylim=0)
    axes.legend(loc="upper left")
    caption = (
        f"{most} processes do {gains[-1]:.2f} times the images/s of one; the dashed line is where "
        "they would be if sharing the work cost nothing."
    )
    head = ("processes", "images/s", "speed-up")
    table = [(n, speed, f"{gain:.2f}") for (n, speed), gain in zip(rows, gains)]
    return figure(name, title, caption, results, drawing, head, table)


def draw_bandwidth(name, title, results):
    """Draw the bus bandwidth of all_reduce over the size, as lessons 1 and 9 print it."""
    row = (
        r"^(?:(.*), (\d+) ranks, )? *(\d+) (kB|MB): +([\d.]+) ms, +([\d.,]+) MB/s, "
        r"bus +([\d.,]+) MB/s$"
    )
    series, sizes, rows = {}, {}, []
    for result in results:
        for where, ranks, size, unit, *measured in find(row, [result]):
            # Lesson 1 names its ranks once, above.
            where, ranks = where or "all", ranks or "".join(find(r"^ranks: (\d+)", [result]))
            label, count = f"lesson {result['id']}: {where}, {ranks} ranks", f"{size} {unit}"
            size = int(size) * {"kB": 1e3, "MB": 1e6}[unit]
            sizes[size] = count
            series.setdefault(label, []).append((size, number(measured[-1])))
            rows.append((label, count, *measured))
    if not rows:
        return None
    drawing = Figure()
    axes = drawing.subplots()
    for (label, points), color in zip(series.items(), (BLUE, GREEN, ORANGE)):
        axes.plot(*zip(*points), "o-", color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log", nonpositive="mask")  # a single rank has a bus bandwidth of 0
    axes.set(xlabel="size of the message", ylabel="bus bandwidth, MB/s")
    axes.set_xticks(list(sizes), list(sizes.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    plain_ticks(axes.yaxis)
    axes.legend()
    caption = (
        "Every message has a fixed cost: a small one spends its time on that, and only a large "
        "one comes near to what the connection can carry."
    )
    head = ("where", "size", "ms", "MB/s", "bus MB/s")
    return figure(name, title, caption, results, drawing, head, rows)


def draw_time_shares(name, title, results):
    """Draw where the time of each rank went, as lesson 5 and test-profile print it."""
    kinds = ("data", "compute", "communication", "overlap", "idle")
    rows = find(r"^ *(\d+)" + r" +([\d.]+)%" * 5 + "$", results)
    if not rows:
        return None
    data, compute, communication, overlap, idle = np.array(rows, dtype=float).T[1:]
    parts = {  # what overlaps is printed with both, and has its place in the bar once
        "data": (data, PURPLE),
        "computing": (compute - overlap, BLUE),
        "both (overlap)": (overlap, GREEN),
        "communicating": (communication - overlap, ORANGE),
        "idle": (idle, GREY),
    }
    drawing = Figure()
    axes, left = drawing.subplots(), np.zeros(len(rows))
    for label, (share, color) in parts.items():
        bars = axes.barh([row[0] for row in rows], share, left=left, color=color, label=label)
        texts = [f"{x:.0f}" if x >= 6 else "" for x in share]
        axes.bar_label(bars, texts, label_type="center", color="#111111")
        left += share
    axes.set(xlabel="% of the time", ylabel="rank")
    axes.margins(x=0)
    axes.invert_yaxis()
    axes.grid(visible=False)
    drawing.legend(loc="outside upper center", ncols=3)
    (hidden,) = find(r"^=> .* hidden by computing: (\d+)%$", results)
    caption = (
        "Only where a rank computes and communicates at once does a message cost no extra time: "
        f"here that is {hidden}% of all communication."
    )
    table = [(row[0], *(f"{x}%" for x in row[1:])) for row in rows]
    return figure(name, title, caption, results, drawing, ("rank", *kinds), table)


SOURCES = {"streamed": BLUE, "from memory": GREEN}  # where the images of lesson 11 come from


def draw_throughput(name, title, results):
    """Draw the images/s of each epoch, streamed beside from memory, as lesson 11 prints them."""
    rows, source = [], "streamed"
    for epoch, speed in find(r"^epoch (\d+): .* ([\d,]+) images/s$", results):
        if rows and epoch == "0":  # the epochs begin again
            source = "from memory"
        rows.append((source, epoch, speed))
    if not rows:
        return None
    drawing = Figure()
    axes = drawing.subplots()
    for (source, color), shift in zip(SOURCES.items(), (-0.2, 0.2)):
        points = [(int(epoch) + shift, number(speed)) for x, epoch, speed in rows if x == source]
        if points:
            bars = axes.bar(*zip(*points), width=0.38, color=color, label=source)
            axes.bar_label(bars, fmt="{:,.0f}", padding=2)
    axes.set(xlabel="epoch", ylabel="images/s")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.1)
    axes.grid(visible=False, axis="x")
    drawing.legend(loc="outside upper center", ncols=2)
    caption = "Where the streamed bar is no lower than the other, reading has cost no time."
    head = ("data", "epoch", "images/s")
    return figure(name, title, caption, results, drawing, head, rows)


def draw_memory(name, title, results):
    """Draw the memory that lesson 11 prints, streamed beside from memory."""
    row = r"^(streamed|from memory): .*at most ([\d,]+) MB in memory(?:, a worker ([\d,]+) MB)?$"
    rows = find(row, results)
    if not rows:
        return None
    drawing = Figure()
    axes = drawing.subplots()
    for source, rank, worker in rows:
        bars = {f"rank 0,\n{source}": number(rank)}
        if worker:  # only where the images are streamed
            bars["its worker,\nstreamed"] = number(worker)
        drawn = axes.barh(list(bars), list(bars.values()), color=SOURCES[source])
        axes.bar_label(drawn, fmt="{:,.0f} MB", padding=3)
    axes.set(xlabel="most memory held, MB")
    axes.margins(x=0.18)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    caption = (
        "The most memory that rank 0 and its reading worker held: streaming needs room for some "
        "chunks, training from memory for all images."
    )
    head = ("data", "rank 0, MB", "largest worker, MB")
    return figure(name, title, caption, results, drawing, head, rows)


# What is drawn: name, function, title, and the lessons that it is made from.
FIGURES = [
    ("loss", draw_loss, "Loss", ("2", "6")),
    ("rate-loss", draw_loss, "Loss and learning rate", ("8",)),
    ("speed-up", draw_speed_up, "Speed-up", ("7",)),
    ("bandwidth", draw_bandwidth, "Bandwidth of all_reduce", ("1", "9")),
    ("time-shares", draw_time_shares, "Where the time goes: lesson 5", ("5",)),
    ("profile-shares", draw_time_shares, "Where the time goes: test-profile", ("test-profile",)),
    ("nodes-loss", draw_loss, "Loss across nodes", ("10",)),
    ("throughput", draw_throughput, "Streaming: throughput", ("11",)),
    ("memory", draw_memory, "Streaming: memory", ("11",)),
]


def draw(results):
    """Return the figures that the lessons which ended well have numbers for."""
    well = {x["id"]: x for x in results if not x["problem"] and not x["skipped"]}
    figures = []
    for name, function, title, lessons in FIGURES:
        sources = [well[lesson] for lesson in lessons if lesson in well]
        if sources and (made := function(name, title, sources)):
            figures.append(made)
    return figures


def benchmarks(folder):
    """Return the figures that benchmark.py has left in a folder, in the order of measuring."""
    cases, figures = [json.loads(path.read_text()) for path in folder.glob("*.json")], []
    for case in sorted(cases, key=lambda case: case["began"]):
        name, machine = case["name"], case["machine"]
        ratios = [
            f"{x['what']}: {shown(x['median'])}"
            + (f" ({x['target']}: {x['verdict']})" if x["target"] else "")
            for x in case["ratios"]
        ]
        where = f"{machine['when']}, {machine['CPU']}, torch {machine['torch']}"
        head = ("what", f"median, {case['unit']}", "lowest", "highest", "rounds")
        rows = [
            (what, *(shown(x[key]) for key in ("median", "lowest", "highest")), len(x["values"]))
            for what, x in case["figures"].items()
        ]
        svg, caption = (folder / f"{name}.svg").read_text(), f"{'; '.join(ratios)}. {where}."
        commands = [machine["command"]]
        figures.append(card(f"case-{name}", case["title"], caption, commands, svg, head, rows))
    return figures


def code(text):
    """Return a text with what stands between backticks as HTML code."""
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))


def write(path, results, command, began):
    """Write the page. Raise OSError if that is not possible.

    results: as above; command: what the user typed; began: when, in seconds as time.time().
    """
    path.parent.mkdir(exist_ok=True)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["code"] = code
    with style.context(["default", STYLE]):
        figures = draw(results)
    page = environment.get_template("report.html.j2").render(
        results=results,
        figures=figures,
        benchmarks=benchmarks(path.parent / "benchmark"),
        facts=facts(command, began),
    )
    path.write_text(page, encoding="utf-8")
