import os
import pickle
from itertools import combinations, pairwise
from pathlib import Path

import h5py
from exercises.common import Fact, attempt, gather, noted, once
from torch.utils.data import DataLoader


def check_11_1(exercise, rank, world_size):
    path = Path(f"rank{rank}.h5").resolve()
    exercise.write(path, 32)
    dataset = exercise.Images(path)
    # Forked workers that share an open file may read anything.
    handles = h5py.h5f.get_obj_count(types=h5py.h5f.OBJ_FILE)
    sent, error = attempt(pickle.dumps, dataset)
    yield Fact("sending the data set to a worker ended with error:", error)
    yield Fact("files that are open before the workers start:", handles)
    if error or handles:
        return
    yield Fact(
        "bytes that are sent to a worker:", len(sent), most=2000
    )  # not all images
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    yield Fact(
        "images that two workers read:",
        [int(x.max()) for batch in loader for x in batch],
    )


def check_11_2(exercise, rank, world_size):
    steps, error = attempt(exercise.train, 10, rank, world_size)
    yield Fact("training ended with error:", error)
    yield Fact("steps of training:", steps)
    yield Fact(
        "batches of 10 chunks:", len(list(exercise.batches(10, rank, world_size)))
    )
    numbers = [
        x for part in exercise.batches(12, rank, world_size) for x in part.tolist()
    ]
    yield Fact(
        "numbers of 12 chunks seen exactly once:", once(gather(numbers), 12 * 16)
    )
    counts = [len(list(exercise.batches(10, other, 3))) for other in range(3)]
    yield Fact("batches of 10 chunks on each of 3 ranks:", counts)


def check_11_3(exercise, rank, world_size):
    orders, chunks = [], []
    for epoch in (0, 1):
        file = exercise.File(4 * world_size, 8)
        reads = noted(file, "read")
        images = [
            int(image) for image in exercise.stream(file, epoch, rank, world_size)
        ]
        yield Fact(f"chunks read in epoch {epoch}:", len(reads), "chunks", right=4)
        seen = once(gather(images), 32 * world_size)
        yield Fact(f"images seen exactly once in epoch {epoch}:", seen, "order")
        # In order, the next image has the next number: 7 of 8 times within a chunk.
        follow = sum(y == x + 1 for x, y in pairwise(images))
        yield Fact(
            "images that follow the one before them in the file:",
            follow,
            "within",
            most=15,
        )
        orders.append(images)
        chunks.append({})
        for image in images:
            chunks[epoch].setdefault(image // 8, []).append(image % 8)
    yield Fact(
        "the order of epoch 1 is that of epoch 0:", orders[0] == orders[1], "order"
    )
    again = len(chunks[0].keys() & chunks[1].keys())
    yield Fact("chunks of epoch 1 that it had in epoch 0, too:", again, "order", most=3)
    within = {tuple(places) for part in chunks for places in part.values()}
    what = "different orders within its chunks, in both epochs:"
    yield Fact(what, len(within), "within", least=2)
    parts = [
        map(int, exercise.stream(exercise.File(6, 8), 0, other, 3))
        for other in range(3)
    ]
    seen = once([[*part] for part in parts], 48)
    yield Fact("images that 3 ranks see exactly once:", seen, "order")


def check_11_4(exercise, rank, world_size):
    """Which images of train() come again: within a rank, between ranks, between epochs.

    It's a capstone, so the result comes first: as long as it's wrong, a learner sees
    only that.
    """
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    loaders = noted(DataLoader, "__iter__")
    firsts, seconds = zip(*gather(exercise.train()[1]))
    yield Fact("result: images seen exactly once in epoch 0:", once(firsts, 512))
    again = sum(len(first) - len(set(first)) for first in firsts)
    yield Fact("within a rank: images of epoch 0 that came again:", again, "worker")
    common = sum(len(set(one) & set(other)) for one, other in combinations(firsts, 2))
    yield Fact("between ranks: images of epoch 0 on two of them:", common, "rank")
    same = sum(first == second for first, second in zip(firsts, seconds))
    yield Fact("between epochs: ranks with the same order in epoch 1:", same, "epoch")
    workers = [loader.num_workers for (loader,), _ in loaders]
    yield Fact("workers of a rank:", max(workers, default=0))
