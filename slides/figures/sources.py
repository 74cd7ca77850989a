"""Where the numbers in figures come from: the record, and tables in pages of what it has not."""

import hashlib
import itertools
import json
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from catalog import load  # noqa: E402
from docs import excerpts  # noqa: E402
from docs.blocks import Course  # noqa: E402
from records import SHOWN, bare  # noqa: E402

COURSE = Course()
RECORD = COURSE.records[SHOWN]
MEASURED = Path(__file__).with_name("measured.json")  # measure.py writes it
# What was measured with which code: a lesson, and some of its functions and classes.
CODE = {
    "trace": ("5", "train_one_epoch", "average_gradients", "Net"),
    "memory": ("15", "Layer", "Net"),
}


def printed(lesson):
    """Return what a lesson printed when it was last recorded."""
    return "\n".join(RECORD[lesson]["output"])


def curve(lesson, name=""):
    """Return a recorded loss curve: images seen, and the mean loss since the point before."""
    return RECORD[lesson]["curves"][name]


def recorded(lesson):
    """Return when and where a lesson was recorded."""
    machine = re.sub("^Linux, |, Python [^,]*", "", RECORD[lesson]["on"])
    return f"{RECORD[lesson]['recorded']}, {machine}"


def digest(name):
    """Return a short text that changes with the code with which something was measured."""
    lesson, *parts = CODE[name]
    texts = [excerpts.code(COURSE, "", lesson, part) for part in parts]
    texts = [bare(text.strip("`\n").removeprefix("python\n")) for text in texts]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def measured(name):
    """Return what measure.py has kept under a name; exit if it's of other code than today's."""
    kept = json.loads(MEASURED.read_text()).get(name, {})
    if kept.get("code") != digest(name):
        sys.exit(f"No {name} of today's code. Run: python slides/figures/measure.py {name}")
    return kept


def page_of(lesson):
    """Return the text of a lesson's page of Day 2, without the marks of its values."""
    (path,) = ROOT.glob(f"day2/{lesson}_*.md")
    return re.sub(r"<!-- /?n\b.*?-->", "", path.read_text())


def table(text, head):
    """Return the table of a page whose first line begins with head: its rows, as lists of cells."""
    if head not in text:
        sys.exit(f"No table begins with {head!r} any more.")
    _, _, *rows = text[text.index(head) :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), rows)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def number(text):
    """Return the number at the beginning of a text such as 1,216.6 MB."""
    return float(re.match(r"[\d.,]+", text)[0].replace(",", ""))


def take_links():
    """Return the ms of an all_reduce of 64 MB: {link: [measured, the least that it allows]}."""
    links = {"no network": [number(COURSE.value("9.ms_between_64_mb")), None]}
    page = page_of("9")
    for link, words, speed in (
        ("1 Gbit/s", "link 1gbit` we measured ", 1e9),
        ("100 Mbit/s", "link 100mbit`, ", 1e8),
    ):
        links[link] = [number(page.partition(words)[2]), 64e6 * 8 / speed * 1e3]
    return links


def take_layouts():
    """Return LAYOUT.md's first table, [layout, way to read, images per CPU-second]."""
    rows = table((ROOT / "day2" / "LAYOUT.md").read_text(), "| layout | read |")
    return [[layout, way, int(number(speed))] for layout, way, _, speed, _ in rows]


def take_memory():
    """Return what LAYOUT.md says of memory: {file: MB streamed, and MB as a whole}."""
    rows = table((ROOT / "day2" / "LAYOUT.md").read_text(), "| file | streamed |")
    return {file: [int(number(cell)) for cell in row] for file, *row in rows}


def take_ways():
    """Return what lesson 14 measured: {way: [MB sent, ms at 100 Mbit/s, ms at 1 Gbit/s]}."""
    rows = table(page_of("14"), "| way | MB sent |")
    return {way: [float(x) for x in (sent, slow, fast)] for way, sent, slow, _, fast, *_ in rows}


def take_shares():
    """Return what lesson 15 counted, in MB: {name: parameters, gradients, states, at most}."""
    rows = table(page_of("15"), "| | parameters |")
    return {name: [float(x) for x in numbers[:4]] for name, *numbers in rows}


def take_nodes():
    """Return what lesson 18 measured: rows of nodes, Mbit/s, gain predicted and measured."""
    rows = table(page_of("18"), "| nodes | link, Mbit/s |")
    pairs = [(nodes, link, pair) for nodes, link, *cells in rows for pair in cells]
    return [[float(x) for x in (nodes, link, *pair.split(" / "))] for nodes, link, pair in pairs]


def take_slots():
    """Return what lesson 17 drew, [[schedule, % idle, held by stage 0, rows of slots], ...]."""
    block = r"^(\w+), \d+ steps: .*\n((?:stage .*\n)+)idle: ([\d.]+)% .*\nheld at most: \[(\d+)"
    found = re.findall(block, printed("17"), re.M)
    cells = ([row.split()[2:] for row in rows.splitlines()] for _, rows, _, _ in found)
    return [[name, idle, held, rows] for (name, _, idle, held), rows in zip(found, cells)]


def take_defaults():
    """Return lesson 8's defaults, as its parser has them: processes, lr, warm_up and more."""
    lesson = load(COURSE.lessons["8"]["file"])
    with mock.patch.object(sys, "argv", [lesson.__file__]):
        return lesson.parse_args()


def take_samples(images, ranks):
    """Return which of some images DistributedSampler gives to each rank, in two epochs."""
    from torch.utils.data import DistributedSampler

    samplers = [DistributedSampler(range(images), ranks, rank, seed=0) for rank in range(ranks)]
    epochs = []
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in samplers])
    return epochs


def take_parents():
    """Return what each lesson with a number builds on, as its docstring says: {(parent, child)}."""
    found = set()
    for path in ROOT.glob("day[12]/[0-9]*.py"):
        parent = re.search(r"^Builds on: +(\d+)_", path.read_text(), re.M)
        if parent:
            found.add((int(parent[1]), int(path.name.partition("_")[0])))
    return found


def take_short_ways():
    """Return the lessons of two short ways, as the table of the guide has them: {words: [ids]}."""
    rows = table((ROOT / "day1" / "GUIDE.md").read_text(), "| you have | run and read |")
    ways = {}
    for who, lessons, _ in rows:
        text = re.sub(r"\]\(.*?\)", "]", lessons)  # without where the links lead
        ways[who] = [int(x) for x in re.findall(r"(?<![\d.])\d+(?!\.?\d)", text)]
    return {
        "four hours, laptop": ways["four hours"],
        "only sharding": ways['"I only want sharding"'],
    }


def take_two_runs():
    """Return the accuracy and the proof of lesson 4 with the line that divides, and without it."""
    both = []
    for name in ("4.right", "4.wrong"):
        (accuracy,) = re.findall(r"^test accuracy.*", printed(name), re.M)
        (proof,) = re.findall(r"^=>.*", printed(name), re.M)
        both.append((accuracy, re.sub(r" \(limit.*?\)", "", proof)))  # it is long without, too
    return both


def take_images(ranks, count):
    """Return the first training images of each rank, as paths of lines in a square of 20."""
    file = ROOT / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte"
    pixels = np.fromfile(file, np.uint8, offset=16).reshape(-1, 28, 28)
    images = pixels[:, 4:24, 4:24] > 110  # around them, all is empty
    return [
        ["".join(map(rows_of, range(20), images[i].tolist())) for i in indices[:count]]
        for indices in take_samples(len(images), ranks)[0]
    ]


def rows_of(y, pixels):
    """Return a path of the lines in a row: M3 8h4 is 4 pixels long."""
    bits = "".join("#" if pixel else " " for pixel in pixels)
    return "".join(f"M{x.start()} {y}h{len(x[0])}" for x in re.finditer("#+", bits))
