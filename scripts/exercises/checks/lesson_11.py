import os
import pickle
from itertools import combinations, pairwise

import h5py
from exercises.common import attempt, shared_folder
from torch.utils.data import DataLoader


def check_11_1(exercise, rank, world_size, report):
    path = shared_folder(rank) / f"rank{rank}.h5"
    exercise.write(path, 32)
    dataset = exercise.Images(path)
    handles = h5py.h5f.get_obj_count(types=h5py.h5f.OBJ_FILE)
    sent, error = attempt(pickle.dumps, dataset)
    if report.no_error("sending the data set to a worker:", error):
        report.at_most("bytes that are sent to a worker:", len(sent), 2000)  # not all images
    # Forked workers that share an open file may read anything.
    if sent and report.equal("files that are open before the workers start:", handles, 0):
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        images = [image for batch in loader for image in batch]
        right = sum(int(image.max()) == place for place, image in enumerate(images))
        report.equal("images that two workers read as they are:", right, 32)


def check_11_2(exercise, rank, world_size, report):
    steps, error = attempt(exercise.train, 10, rank, world_size)
    report.no_error("training ended with", error)
    batches = len(list(exercise.batches(10, rank, world_size)))
    numbers = [x for part in exercise.batches(12, rank, world_size) for x in part.tolist()]
    seen = yield steps, batches, [numbers]
    *_, numbers = zip(*seen)
    for rank, (steps, batches, _) in enumerate(seen):
        report.equal(f"rank {rank}: batches of 10 chunks:", batches, 10 // len(seen))
        report.equal(f"rank {rank}: steps of training:", steps, 10 // len(seen))
    report.each_once("numbers of 12 chunks", numbers, 12 * 16)


def check_11_3(exercise, rank, world_size, report):
    orders = []
    for epoch in (0, 1):
        file = exercise.File(4 * world_size, 8)
        images = [int(image) for image in exercise.stream(file, epoch, rank, world_size)]
        report.at_most(f"chunks read in epoch {epoch}:", file.reads, 4)
        # In order, the next image has the next number: 7 of 8 times within a chunk.
        follow = sum(y == x + 1 for x, y in pairwise(images))
        report.at_most("images that follow the one before them in the file:", follow, 15)
        orders.append(images)
    report.new_order(*orders)
    seen = yield orders
    report.each_once("images", seen, 32 * len(seen))


def check_11_4(exercise, rank, world_size, report):
    """Which images of train() come again: within a rank, between ranks, between epochs.

    It's a capstone, so the result comes first: as long as it's wrong, a learner sees only that.
    """
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    seen = yield exercise.train()[1]
    firsts = [first for first, _ in seen]
    report.each_once("images", [[first] for first in firsts], 512)
    again = sum(len(first) - len(set(first)) for first in firsts)
    report.equal("within a rank: images of epoch 0 that came again:", again, 0)
    common = sum(len(set(one) & set(other)) for one, other in combinations(firsts, 2))
    report.equal("between ranks: images of epoch 0 on two of them:", common, 0)
    same = any(first == second for first, second in seen)
    text = "between epochs: epoch 1 has"
    report.equal(text, "the order of epoch 0" if same else "a new order", "a new order")
    report.equal("workers of a rank:", exercise.WORKERS, 2)
