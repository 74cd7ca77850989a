"""Charts of Day 2: what lessons 9 and 11 measured."""

from drawing import COMPUTE, DONE, GREY, INK, RANKS, SEND, SIZE, plot, say
from sources import take_layouts, take_links, take_memory


def link_9():
    """An all_reduce of 64 MB between two nodes: what the link allows, and what was measured."""
    data = take_links()
    axes = plot(4.4)
    axes.set_position((0.22, 0.2, 0.68, 0.66))
    axes.grid(False)
    axes.grid(axis="x", color="#d5dae0")
    places = range(len(data))[::-1]
    measured = [ms for ms, _ in data.values()]
    # Dots: on a log axis the length of a bar would mean nothing.
    axes.plot(measured, places, "o", ms=17, color=SEND, mec=INK, label="measured")
    label = "the least that the link allows"
    for place, (ms, least) in zip(places, data.values()):
        words = f"{ms:,.0f} ms"
        if least:
            words += f", least {least:,.0f}"
            ys = [place - 0.33, place + 0.33]
            axes.plot([least] * 2, ys, color=RANKS[0], lw=5, label=label, zorder=1)
            label = None
        x, ha = (ms / 1.4, "right") if ms > 1000 else (ms * 1.35, "left")
        say(axes, x, place, words, SIZE, ha=ha)
    axes.set(xscale="log", xlim=(10, 10000), ylim=(-0.6, len(data) - 0.4))
    axes.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
    axes.minorticks_off()
    axes.set_xlabel("ms, log scale", size=SIZE)
    axes.set_yticks(places, list(data))
    axes.legend(
        fontsize=SIZE, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.36, 0.98)
    )
    return axes


def layout_speed():
    """What the layout of a file decides: images per CPU-second, one at a time or whole chunks."""
    data = take_layouts()
    shown = [
        ("not chunked", "one at a time", "not chunked"),
        ("chunks of 256", "one at a time", "chunks of 256"),
        ("chunks of 256, gzip 4", "one at a time", "chunks, gzip"),
        ("chunks of 256", "whole chunks", "chunks of 256"),
        ("chunks of 256, gzip 4", "whole chunks", "chunks, gzip"),
    ]
    speeds = {(layout, read): speed for layout, read, speed in data}
    axes = plot(4.9)
    axes.set_position((0.23, 0.16, 0.72, 0.72))
    axes.grid(False)
    axes.grid(axis="x", color="#d5dae0")
    places = [5.6, 4.6, 3.6, 2, 1]
    for place, (layout, way, _) in zip(places, shown):
        speed = speeds[layout, way]
        color = SEND if way == "one at a time" else DONE
        axes.plot(speed, place, "o", ms=17, color=color, mec=INK)  # no bars on a log axis
        x, ha = (speed / 1.3, "right") if speed > 1e6 else (speed * 1.3, "left")
        say(axes, x, place - 0.08, f"{speed:,}", SIZE, ha=ha)
    axes.set(xscale="log", xlim=(500, 1e7), ylim=(0.4, 6.2))
    axes.set_xticks([1e3, 1e4, 1e5, 1e6, 1e7], ["1,000", "10,000", "100,000", "1 million", ""])
    axes.minorticks_off()
    axes.set_yticks(places, [label for _, _, label in shown])
    axes.set_xlabel("images per CPU-second, log scale", size=SIZE)
    words = "orange: one image at a time\ngreen: whole chunks"
    axes.figure.text(0.955, 0.93, words, size=SIZE, color=GREY, ha="right", va="center")
    return axes


def memory_file():
    """What streaming holds in memory, for a file and for one that is 20 times as large."""
    data = take_memory()
    axes = plot(4.7)
    axes.set_position((0.14, 0.2, 0.83, 0.75))
    names = ["streamed", "the whole file in memory"]
    for i, ((file, sizes), color) in enumerate(zip(data.items(), (COMPUTE, RANKS[0]))):
        places = [place + (i - 0.5) * 0.38 for place in range(2)]
        bars = axes.bar(places, sizes, width=0.36, color=color, label=file)
        axes.bar_label(bars, [f"{x:,}" for x in sizes], size=SIZE, padding=3)
    axes.set_xticks(range(2), names)
    axes.set_ylabel("MB", size=SIZE)
    axes.set_ylim(0, 1250)
    axes.set_yticks([0, 400, 800, 1200])
    axes.legend(fontsize=SIZE, frameon=False, loc="upper left", ncols=2)
    return axes
