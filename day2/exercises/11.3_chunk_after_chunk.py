"""Exercise 11.3: each chunk read once, and yet a random order.

Lesson:  11
Kind:    fill in, 20 minutes
Task:    Complete stream(): each image once over all ranks, in an order that is new in
         each epoch, and each chunk read only once. As given, a whole chunk is read for
         each image. (The file is simulated, and counts.)
Run:     python day2/exercises/11.3_chunk_after_chunk.py
Check:   python scripts/check.py 11.3
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def stream(file, epoch, rank, world_size):
    """Yield this rank's images. All get the same number: file.chunks can be divided."""
    generator = torch.Generator().manual_seed(epoch)
    # TODO: shuffle the chunks, take this rank's share of them, read each chunk once,
    #       and give out its images in random order.
    order = torch.randperm(file.chunks * file.chunk_size, generator=generator)
    for image in order[rank::world_size].tolist():
        chunk = file.read(image // file.chunk_size)
        yield chunk[image % file.chunk_size]


def main():
    """Run on every rank: read two epochs, and let rank 0 show what was read."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in range(2):
        file = File(chunks=4, chunk_size=5)
        images = list(stream(file, epoch, rank, world_size))
        rows = gather((images, file.reads))
        if rank == 0:
            for r, (images, reads) in enumerate(rows):
                print(f"epoch {epoch}, rank {r}: chunks read {reads}, images {images}")


class File:
    """Simulates an HDF5 file with compressed chunks: it can only read a whole one."""

    def __init__(self, chunks, chunk_size):
        self.chunks = chunks
        self.chunk_size = chunk_size
        self.reads = 0

    def read(self, chunk):
        """Return the images of a chunk. Here an image is a number."""
        self.reads += 1
        first = chunk * self.chunk_size
        return list(range(first, first + self.chunk_size))


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
