"""What the numbers of each lesson must show, beyond its proof line.

Each check gets what the lesson has printed, its number of ranks, and the folder where it ran.
"""

import re

import pytest
import torch
from helpers import load_lesson, proof_of


def number(text):
    """Return a number as a lesson prints it, such as 1,234.5."""
    return float(text.replace(",", ""))


def check_sums(output, ranks, folder):
    """Each rank comes with its own number and leaves with the sum."""
    rows = re.findall(r"^rank (\d+) of (\d+) .*: (\d+) before, (\d+) after$", output, re.M)
    total = str(sum(range(ranks)))
    assert rows == [(str(rank), str(ranks), str(rank), total) for rank in range(ranks)]


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


def check_98_percent(output, ranks, folder):
    """With its defaults lesson 2 comes to what its page says, on any machine about."""
    assert float(re.search(r"^=> ([\d.]+)%", output, re.M)[1]) > 97


def check_visits(output, ranks, folder):
    """Where the images cannot be divided, the sampler visits a few twice to fill up."""
    twice = -60_000 % ranks
    assert f"visited exactly once per epoch: {60_000 - twice:,} of 60,000 images" in output


def check_shares(output, ranks, folder):
    """Each microsecond is data, compute, communication or idle. An overlap counts twice."""
    rows = re.findall(r"^ +\d+" + r" +([\d.]+)%" * 5 + "$", output, re.M)
    assert len(rows) == ranks
    for row in rows:
        data, compute, communication, overlap, idle = map(float, row)
        assert data > 0
        assert compute > 0.1
        assert ranks == 1 or communication > 0.1
        assert data + compute + communication - overlap + idle == pytest.approx(100, abs=1)
    traces = sorted(folder.glob("log*/*.pt.trace.json"))
    assert [trace.name.split(".")[0] for trace in traces] == [f"rank{r}" for r in range(ranks)]


def check_saved_model(output, ranks, folder):
    """The file can be loaded as the page says."""
    saved = re.search(r"^saved: (.*)$", output, re.M)[1]
    load_lesson("6").Net().load_state_dict(torch.load(folder / saved))


def check_timing(output, ranks, folder):
    """In each row ms/step, s/epoch and images/s are the same time."""
    row = r"^\w.*?" + r" +([\d,.]+)" * 5 + r" +([\d.]+) \(([\d.]+) to ([\d.]+)\)$"
    rows = re.findall(row, output, re.M)
    assert len(rows) == 4
    for numbers in rows:
        _, together, milliseconds, epoch, speed, median, lowest, highest = map(number, numbers)
        assert epoch * speed == pytest.approx(60_000, rel=0.02)
        rounding = 0.05 / milliseconds  # one digit is printed
        assert milliseconds * speed == pytest.approx(1000 * together, rel=0.01 + rounding)
        assert lowest <= median <= highest


def check_gap(output, ranks, folder):
    """A scaled learning rate brings the loss curve closer to that of one process."""
    unscaled, scaled = (int(gap) for gap in re.findall(r"(\d+)% \w+", proof_of(output)))
    if ranks == 1:
        assert (unscaled, scaled) == (0, 0)
    else:
        assert scaled < 0.7 * unscaled
    rate = f"{0.00125 * ranks:g}"
    assert f"\nlinear: global batch {8 * ranks}, learning rate {rate}, mean loss" in output


def check_points(output, ranks, folder):
    """However the points are divided, lesson 15 tests on each once."""
    assert "\ntested on 99 more points: " in output


def check_split(output, ranks, folder):
    """What a rank has and gives to all_reduce, by hand and with PyTorch, on this mesh."""
    data, tensor = map(int, re.search(r"^=> mesh (\d+) x (\d+): ", output, re.M).groups())
    assert data * tensor == ranks
    split = re.compile(r"layers.*(query|key|value|up|(mix|down).weight)")
    own = 0
    for name, parameter in load_lesson("19").Net().named_parameters():
        own += parameter.numel() // (tensor if split.search(name) else 1)
    activations = 32 // data * 64 * 64 * 4  # bytes
    given = [f"16 x {activations:,}"] * (tensor > 1) + [f"1 x {own * 4:,}"] * (data > 1)
    line = f": {own:,} parameters a rank, {' + '.join(given) or 0} bytes to all_reduce\n"
    assert output.count(line) >= 2


def check_pipeline(output, ranks, folder):
    """Both schedules: idle slots as drawn, micro-batches held, messages and their bytes."""
    drawn = re.findall(r"^stage \d  (.*)$", output, re.M)
    assert len(drawn) == 2 * ranks
    share = (ranks - 1) / (8 + ranks - 1)
    for rows in (drawn[:ranks], drawn[ranks:]):
        cells = " ".join(rows).split()
        assert cells.count("..") / len(cells) == pytest.approx(share)
        assert sorted(set(cells) - {".."}) == sorted(
            f"{what}{n}" for what in "FB" for n in range(8)
        )
    messages = 2 * 8 * (ranks - 1)  # of 4 pieces, 64 characters, 64 float32
    idle = f"idle: {share:.1%} of slots; messages: {messages}, {messages * 4 * 64 * 64 * 4:,} bytes"
    assert output.count(f"\n{idle}\n") == 2
    held = [[int(x) for x in row.split(",")] for row in re.findall(r"at most: \[(.*)\]", output)]
    assert held == [[8] * ranks, list(range(ranks, 0, -1))]
    sizes = [
        [float(x) for x in re.findall(r"\d+\.\d+", row)] for row in re.findall("s, .* MB", output)
    ]
    for most, of_all, of_few in zip(held[1], *sizes, strict=True):
        assert of_few == pytest.approx(of_all * most / 8, abs=0.02)
    assert len(set(re.findall(r"mean loss (\S+)$", output, re.M))) == 1


NUMBERS = {
    "0": check_sums,
    "1": check_bandwidth,
    "2": check_98_percent,
    "4": check_visits,
    "5": check_shares,
    "6": check_saved_model,
    "test-profile": check_shares,
    "7": check_timing,
    "8": check_gap,
    "9": check_sums,
    "10": check_saved_model,
    "15": check_points,
    "19": check_split,
    "20": check_pipeline,
}
