"""Solution 11.1: a data set that cannot go to its workers.

Lesson:  11
Kind:    find the fault, 10 minutes
Symptom: Reading in the rank itself works. A DataLoader with workers must send the data
         set to them, and that fails; or, where workers are forked, there is no error,
         and they may read anything.
Run:     python day2/exercises/solutions/11.1_cannot_be_sent.py
Check:   python scripts/check.py 11.1 --solution
"""

import os
import pickle
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import h5py
import torch
import torch.distributed as dist
from torch.utils.data import Dataset


class Images(Dataset):
    """The images of an HDF5 file, one at a time: uint8 [28, 28]."""

    def __init__(self, path):
        self.path = path
        self.file = None
        with h5py.File(path) as file:  # and closed: an open file cannot go to a worker
            self.count = len(file["images"])

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.file is None:  # opened by the process that reads
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["images"][index])


def main():
    """Run on every rank: open the file, send the data set to a worker."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "images.h5")
        write(path, 32)
        dataset = Images(path)
        open_files = h5py.h5f.get_obj_count(types=h5py.h5f.OBJ_FILE)
        at_worker = sent(dataset)
        result = at_worker if isinstance(at_worker, str) else int(at_worker[7].max())
        rows = gather((open_files, result))
    for rank, (count, result) in enumerate(rows):
        if dist.get_rank() == 0:
            print(f"rank {rank}: open files {count}; image 7 at the worker: {result}")


def write(path, count):
    """Write images: all points of image number n have the value n."""
    numbers = torch.arange(count, dtype=torch.uint8)
    with h5py.File(path, "x") as file:
        file["images"] = numbers.view(-1, 1, 1).repeat(1, 28, 28)


def sent(dataset):
    """Return what a worker gets that is not forked, or why it gets nothing."""
    try:
        return pickle.loads(pickle.dumps(dataset))
    except TypeError as error:
        return f"TypeError: {error}"


# ---- Shared helpers, identical in every exercise


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start():
    """Be one rank: join the process group, run main, leave the group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    main()
    dist.barrier()  # leave together
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        start()
    else:  # started with python: let torchrun start the ranks
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
