"""Measure how fast MNIST can be read in random order from files of several layouts.

Usage: scripts/read_speed.py      prints a Markdown table, in less than a minute

One process, one thread. What the ways are is said in benchmark/layouts.py. The files have just been
written and are still in memory (the page cache) when they are read: this measures the work of
reading, not the disk.

With pip install webdataset lmdb the table has these two as well. The course needs neither.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from benchmark.layouts import load_tensors, make_ways, rate
from course.machine import recorded

REPEATS = 3


def main():
    """Measure all ways in turn, several times; print where and when, then the table of medians."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = load_tensors()
    with tempfile.TemporaryDirectory() as folder:
        ways = make_ways(Path(folder), tensors)
        rates = [[rate(read) for *_, read, _ in ways] for _ in range(REPEATS)]
    medians = [statistics.median(column) for column in zip(*rates)]
    hdf5 = f"h5py {h5py.__version__} with HDF5 {h5py.version.hdf5_version}"
    print(recorded("python scripts/read_speed.py", hdf5, f"numpy {np.__version__}"))
    print("| layout | read | MB | images/s | against the first |")
    print("|---|---|---|---|---|")
    for (layout, how, size, *_), median in zip(ways, medians):
        print(f"| {layout} | {how} | {size:.1f} | {median:,.0f} | {median / medians[0]:.2g} |")


if __name__ == "__main__":
    main()
