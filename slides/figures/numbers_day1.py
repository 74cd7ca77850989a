"""Charts of Day 1, and of lesson 10, which repeats lesson 8 on two nodes."""

# ruff: noqa: RUF001 (a figure may say × and −)
import re

from drawing import GREY, INK, RANKS, SIZE, plot, say, source
from sources import curve, printed, recorded, take_defaults


def bandwidth_1():
    """What lesson 1 printed: the bandwidth of all_reduce over the size of the tensor."""
    row = r"^ *(\d+) ([kM])B: +([\d.]+) ms .*?, +([\d.]+) MB/s"
    rows = re.findall(row, printed("1"), re.M)
    sizes = [int(size) * {"k": 1e-3, "M": 1.0}[unit] for size, unit, _, _ in rows]
    speeds = [float(speed) for *_, speed in rows]
    axes = plot(4.9)
    axes.set_position((0.15, 0.2, 0.81, 0.76))
    axes.loglog(sizes, speeds, "o-", color=RANKS[0], lw=3.5, ms=12)
    for x, y, (size, unit, time_taken, speed) in zip(sizes, speeds, rows):
        side, right, up = ("left", 1.9, 0.5) if x < 0.1 else ("right", 1, 3.6)
        words = f"{size} {unit}B in {float(time_taken):.3g} ms:\n{speed} MB/s"
        place = (x * right, y * up)
        axes.annotate(words, place, size=SIZE, ha=side, va="center", color=INK)
    axes.set_xlim(0.002, 200)
    axes.set_ylim(0.1, 10_000)
    axes.set_xticks(sizes, [f"{size} {unit}B" for size, unit, *_ in rows])
    axes.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor", size=SIZE)
    axes.set_ylabel("MB/s", size=SIZE)
    return axes


def warm_up():
    """The learning rate of lesson 8 over the steps: it rises to that of all ranks."""
    defaults = take_defaults()
    ranks, low, steps = defaults.processes, defaults.lr, defaults.warm_up
    axes = plot(4.8)
    axes.set_position((0.19, 0.19, 0.77, 0.76))
    rates = [low + (ranks - 1) * low * min(i / steps, 1) for i in range(2 * steps + 1)]
    axes.axvspan(0, steps, color="#fff4d1")
    for rate in (low, ranks * low):
        axes.axhline(rate, color=GREY, lw=1.5, ls="--")
    axes.plot(range(len(rates)), rates, "o-", color=RANKS[0], lw=3.5, ms=9, clip_on=False)
    axes.grid(False)
    axes.set_xlim(0, 2 * steps)
    axes.set_ylim(0, ranks * low * 1.24)
    axes.set_xticks(range(0, 2 * steps + 1, 2))
    axes.set_yticks([0, low, ranks * low], ["0", f"{low:g}", f"{ranks * low:g}"])
    axes.set_xlabel("step", size=SIZE)
    axes.set_ylabel("learning rate", size=SIZE)
    high = f"{ranks} × {low:g}: for {ranks} ranks"
    say(axes, 1.5 * steps + 0.3, ranks * low * 1.09, high, SIZE)
    say(axes, 1.5 * steps + 0.3, low * 1.36, f"{low:g}: for one process", SIZE)
    say(axes, steps / 2, ranks * low * 1.16, f"warm-up: {steps} steps", SIZE, weight="bold")
    return axes


def loss_axes(last, where):
    """Return axes for loss curves over the images seen, up to the last one."""
    axes = plot()
    axes.set_yscale("log")
    axes.set_xlabel("images seen", size=SIZE)
    axes.set_ylabel("training loss", size=SIZE)
    axes.set_xlim(0, 1.01 * last)
    axes.set_xticks(range(0, last + 1, round(last / 4000) * 1000))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    source(axes, where)
    return axes


def finish(axes, ticks):
    """Label the losses, and the curves."""
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=SIZE, frameon=False)
    return axes


def curves(named, where):
    """Draw loss curves {label: (curve, colour)} over the images seen."""
    axes = loss_axes(max(seen[-1] for (seen, _), _ in named.values()), where)
    for label, (points, color) in named.items():
        axes.plot(*points, color=color, lw=3.5, label=label)
    return finish(axes, [0.03, 0.1, 0.3, 1, 3])


def loss_2():
    """The loss curve of lesson 2."""
    label = "mean of about 31 batches of 64"
    return curves({label: (curve("2"), RANKS[0])}, f"Lesson 2, {recorded('2')}")


def loss_6():
    """The loss curves of lessons 2 and 6."""
    return curves(
        {
            "lesson 6: 4 ranks, global batch 256": (curve("6"), RANKS[1]),
            "lesson 2: 1 process, batch 64": (curve("2"), RANKS[0]),
        },
        f"Lessons 2 and 6, {recorded('6')}",
    )


def loss_8():
    """The loss curves of lesson 8."""
    rates = dict(re.findall(r"^(\w+): .* learning rate ([\d.]+),", printed("8"), re.M))
    names = {"unscaled": "4 ranks", "linear": "4 ranks", "alone": "1 process"}
    chosen = {
        f"{ranks}, rate {rates[name]}": (curve("8", name), color)
        for (name, ranks), color in zip(names.items(), (RANKS[1], RANKS[2], RANKS[0]))
    }
    return curves(chosen, f"Lesson 8, {recorded('8')}")


def loss_10():
    """The loss curve of lesson 10 on two nodes, over that of lesson 6 on one."""
    axes = loss_axes(curve("6")[0][-1], f"Lessons 6 and 10, {recorded('10')}")
    axes.plot(*curve("6"), color=RANKS[0], lw=3, label="lesson 6: one node")
    circles = {"ms": 10, "mew": 2, "mfc": "none", "label": "lesson 10: two nodes"}
    axes.plot(*curve("10"), "o", color=RANKS[1], **circles)
    return finish(axes, [0.03, 0.1, 0.3, 1, 3])
