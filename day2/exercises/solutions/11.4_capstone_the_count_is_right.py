"""Solution 11.4: three faults: the count is right, the images are not.

Lesson:  11
Kind:    capstone, 35 minutes
Symptom: 512 images are streamed to 2 simulated nodes with 2 ranks each, and each rank
         has 2 workers. The program counts 512 images per epoch, as it should. But only
         some of them are ever used. Three faults are in this program, and one is still
         there when all that it prints is right.
Run:     python day2/exercises/solutions/11.4_capstone_the_count_is_right.py
Check:   python scripts/check.py 11.4 --solution
"""

import os
import sys
import time
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CHUNKS = 32  # in the simulated file
CHUNK_SIZE = 16  # images; also the batch size of a rank
WORKERS = 2  # per rank
EPOCHS = 2


class ChunkStream(IterableDataset):
    """The images of this rank, a chunk at a time, in an order that is new per epoch."""

    def __init__(self):
        # In memory that the workers see too. Of the rest they keep a copy.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        """Let the next epoch use a different order of the chunks."""
        self.epoch.fill_(epoch)

    def __iter__(self):
        # All workers of all ranks of all nodes in one row: each takes its own part.
        worker = get_worker_info().id
        place = int(os.environ["RANK"]) * WORKERS + worker
        readers = int(os.environ["WORLD_SIZE"]) * WORKERS
        generator = torch.Generator().manual_seed(int(self.epoch))
        chunks = torch.randperm(CHUNKS, generator=generator)
        for chunk in chunks[place::readers].tolist():
            yield read(chunk)


def train():
    """Train a new model. Return it and, for each epoch, the images that it has used."""
    steps = CHUNKS // dist.get_world_size()  # the same number on each rank: none waits
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = ChunkStream()
    options = {"num_workers": WORKERS, "persistent_workers": True, "timeout": 20}
    if sys.platform == "linux":
        options["multiprocessing_context"] = "fork"  # quick; not safe on a Mac
    loader = DataLoader(stream, batch_size=None, **options)
    used = [[] for _ in range(EPOCHS)]
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        for images in islice(loader, steps):
            x = images.unsqueeze(1) / (CHUNKS * CHUNK_SIZE)
            optimizer.zero_grad()
            F.mse_loss(model(x), 2 * x).backward()
            optimizer.step()
            used[epoch] += images.tolist()
    return model, used


def main():
    """Run on every rank of two simulated nodes: train, count the images."""
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    _, used = train()
    for epoch, parts in enumerate(zip(*gather(used), strict=True)):
        images = [image for part in parts for image in part]
        if rank == 0:
            print(f"epoch {epoch}: images {len(images)}, different {len(set(images))}")


def read(chunk):
    """Return the images of a chunk. Here an image is its number, int64 [CHUNK_SIZE]."""
    return torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE)


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
