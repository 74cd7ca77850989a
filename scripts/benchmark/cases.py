"""The cases of benchmark.py: what is measured, against what, and what is aimed at.

The function of a case prepares it and returns its measurements: functions that take nothing and
return {figure: value}. The name of a figure may be "series: place".
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmark.commands import BATCH
from benchmark.reading import (
    COPIES,
    GZIP_ONE,
    GZIP_WHOLE,
    ONE,
    PLAIN_ONE,
    WHOLE,
    data_path,
    memory,
    reading,
    streaming,
)
from benchmark.training import (
    ALL_CORES,
    APART,
    BY_HAND,
    BY_PARAMETER,
    DDP,
    INDEPENDENT,
    LARGE,
    SAME_ALL,
    SAME_EACH,
    all_reduce,
    course,
    ddp,
    scaling,
    start_up,
    time_to_98,
)


@dataclass(frozen=True)
class Ratio:
    """A figure of a case over another one, or a figure by itself, and what it should be."""

    what: str
    over: str
    under: str = ""
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Case:
    """Something to measure. With an axis, its figures are drawn as lines over the places."""

    name: str
    title: str
    unit: str
    prepare: Callable
    ratios: list[Ratio]
    axis: str = ""
    say: Callable | None = None  # from {figure: median} to a sentence


CACHED = "in the page cache: "
CASES = [
    Case(
        "data",
        f"Data path: batches of {BATCH} normalised images, one thread a process",
        "images/s",
        data_path,
        [
            Ratio("lessons / torchvision", "the lessons", "torchvision, 0 workers", at_least=40),
            Ratio("lessons / torchvision, 2 workers", "the lessons", "torchvision, 2 workers"),
            Ratio("by one index / lessons", "a batch by one index", "the lessons"),
        ],
    ),
    Case(
        "time-to-98",
        "Time to 98% of the test images right: whole processes",
        "s",
        time_to_98,
        [Ratio("usual script / lesson 2", "the usual script", "lesson 2", at_least=8)],
    ),
    Case(
        "ddp",
        f"Two ranks against the machine's limit: batches of {BATCH} and {LARGE}",
        "images/s",
        ddp,
        [
            Ratio(
                f"DDP / independent, batches of {batch}",
                f"{DDP}: {batch}",
                f"{INDEPENDENT}: {batch}",
                at_least=0.95,
            )
            for batch in (BATCH, LARGE)
        ]
        + [
            Ratio(f"{what} / independent", f"{name}: {BATCH}", f"{INDEPENDENT}: {BATCH}")
            for what, name in (
                ("by hand, one message", BY_HAND),
                ("a message a parameter", BY_PARAMETER),
            )
        ],
        axis="images in a batch",
    ),
    Case(
        "scaling",
        "Scaling of lesson 7",
        "images/s",
        scaling,
        [
            Ratio(
                "2 / 1 process, weak scaling", f"{SAME_EACH}: 2", f"{SAME_EACH}: 1", at_least=1.8
            ),
            Ratio("2 independent / 1 process", f"{APART}: 2", f"{SAME_EACH}: 1"),
            Ratio("2 / 1 process on all cores, weak", f"{SAME_EACH}: 2", f"{ALL_CORES}: 1"),
            Ratio("4 / 1 process, weak scaling", f"{SAME_EACH}: 4", f"{SAME_EACH}: 1"),
            Ratio("2 / 1 process, strong scaling", f"{SAME_ALL}: 2", f"{SAME_EACH}: 1"),
            Ratio("4 / 1 process, strong scaling", f"{SAME_ALL}: 4", f"{SAME_EACH}: 1"),
        ],
        axis="processes",
    ),
    Case(
        "read",
        "Reading files of several layouts: one process, one thread",
        "images/s",
        reading,
        [
            Ratio("whole chunks / one at a time", CACHED + WHOLE, CACHED + ONE, at_least=50),
            Ratio("the same, gzip", CACHED + GZIP_WHOLE, CACHED + GZIP_ONE, at_least=50),
            Ratio("the same, from disk", f"from disk: {WHOLE}", f"from disk: {ONE}", at_least=50),
            Ratio("whole chunks / not chunked", CACHED + WHOLE, CACHED + PLAIN_ONE),
            Ratio("whole chunks / memmap", CACHED + WHOLE, CACHED + "memmap, one at a time"),
            Ratio("whole chunks / LMDB", CACHED + WHOLE, CACHED + "LMDB, one at a time"),
            Ratio(
                "whole chunks / WebDataset",
                CACHED + WHOLE,
                CACHED + "WebDataset, in order, then shuffled",
            ),
        ],
    ),
    Case(
        "streaming",
        "Lesson 11: an epoch from the file and one from memory, two ranks",
        "images/s",
        streaming,
        [Ratio("streamed / from memory", "streamed", "from memory", at_least=0.95)],
    ),
    Case(
        "memory",
        "The most memory that reading a file takes",
        "MB",
        memory,
        [
            Ratio(f"{copies} x MNIST / 1 x", f"streamed: {copies}", "streamed: 1", at_most=1.05)
            for copies in COPIES[1:]
        ],
        axis="size of the file, times MNIST",
    ),
    Case(
        "all_reduce",
        "Bus bandwidth of all_reduce, two ranks, beside a copy in memory",
        "MB/s",
        all_reduce,
        [
            Ratio(f"all_reduce / copy, {size}", f"all_reduce: {size}", f"copy: {size}")
            for size in ("4 kB", "1 MB", "64 MB")
        ],
        axis="size",
    ),
    Case(
        "start",
        "Start-up: until the first step is done",
        "s",
        start_up,
        [
            Ratio(f"{x} / import torch", x, "import torch, and no more")
            for x in ("lesson 0", "lesson 2", "lesson 6")
        ],
    ),
    Case(
        "course",
        "The whole course, without set-up",
        "s",
        course,
        [Ratio("run_course.sh, seconds", "all lessons", at_most=360)],
    ),
]
