"""Where the numbers in figures come from: recorded data, and the pages of the lessons."""

import itertools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "slides" / "figures" / "data"


def read(name):
    """Return the recorded data, and one line on where they come from."""
    data = json.loads((DATA / f"{name}.json").read_text())
    return data, f"{data['date']}, {data['hardware']}, torch {data['versions']['torch']}"


def printed(page):
    """Return the recorded output on a page of Day 1."""
    text = (ROOT / "day1" / f"{page}.md").read_text()
    return re.search(r"```console\n\$ [^\n]*\n(.*?)```", text, re.S)[1]


def page_of(lesson):
    """Return the text of a lesson's page of Day 2, without the marks of its numbers."""
    (path,) = ROOT.glob(f"day2/{lesson}_*.md")
    return re.sub(r"<!-- /?n\b.*?-->", "", path.read_text())


def table(text, head):
    """Return the table of a page whose first line begins with head: its rows, as lists of cells."""
    if head not in text:
        sys.exit(f"No table begins with {head!r} any more.")
    _, _, *rows = text[text.index(head) :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), rows)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def find(pattern, text):
    """Return the numbers of the groups of a pattern in a page."""
    found = re.search(pattern, text, re.M)
    if not found:
        sys.exit(f"No page holds {pattern!r} any more.")
    return [number(group) for group in found.groups()]


def number(text):
    """Return the number at the beginning of a text such as 1,216.6 MB."""
    return float(re.match(r"[\d.,]+", text)[0].replace(",", ""))


def take_links():
    """Return the ms of an all_reduce of 64 MB: {link: [measured, the least that it allows]}."""
    text, number_of_bytes = page_of("9"), 64e6
    links = {"no network": [*find(r"^between nodes, 2 ranks, 64 MB: +([\d.]+) ms", text), None]}
    measured = r"link 1gbit` we measured ([\d,]+) ms.*link 100mbit`, ([\d,]+) ms"
    for link, speed, ms in zip(("1 Gbit/s", "100 Mbit/s"), (1e9, 1e8), find(measured, text)):
        links[link] = [ms, number_of_bytes * 8 / speed * 1e3]
    return links


def take_layouts():
    """Return the images/s of LAYOUT.md's first table, [layout, way to read, images/s]."""
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
    return [[float(x) for x in (row[0], row[1], row[3], row[4])] for row in rows]


def take_slots():
    """Return what lesson 17 drew, [[schedule, % idle, held by stage 0, rows of slots], ...]."""
    block = r"^(\w+), \d+ steps: .*\n((?:stage .*\n)+)idle: ([\d.]+)% .*\nheld at most: \[(\d+)"
    found = re.findall(block, page_of("17"), re.M)
    cells = ([row.split()[2:] for row in rows.splitlines()] for _, rows, _, _ in found)
    return [[name, idle, held, rows] for (name, _, idle, held), rows in zip(found, cells)]
