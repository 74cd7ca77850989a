"""What the numbers of each lesson must show, beyond its proof line.

Each check gets what the lesson has printed, its number of ranks, and the folder where it ran.
"""

import re

import pytest
import torch
from support.run import load_lesson


def number(text):
    """Return a number as a lesson prints it, such as 1,234.5."""
    return float(text.replace(",", ""))


def check_bandwidth(output, ranks, folder):
    """MB/s is the size by the time. The bus carries 2 (n - 1) / n of it."""
    row = r"([\d,.]+) ms \([\d.]+-[\d.]+\), +([\d,.]+) MB/s \(bus +([\d,.]+)\)"
    rows = re.findall(row, output)
    assert len(rows) == 3
    for size, row in zip((4e3, 1e6, 64e6), rows, strict=True):
        milliseconds, algorithm, bus = map(number, row)
        # The printed numbers are rounded, the short times most.
        assert algorithm == pytest.approx(size / milliseconds / 1e3, rel=0.05, abs=0.1)
        assert bus == pytest.approx(algorithm * 2 * (ranks - 1) / ranks, rel=0.01, abs=0.2)


def check_saved_model(output, ranks, folder):
    """The file can be loaded as the page says."""
    saved = re.search(r"^saved: (.*)$", output, re.M)[1]
    load_lesson("6").Net().load_state_dict(torch.load(folder / saved))
