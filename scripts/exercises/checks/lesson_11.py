"""What the check of each exercise of lesson 11 does."""

import itertools
import os
import pickle

import h5py
from exercises.common import attempt, shared_folder
from torch.utils.data import DataLoader


def check_11_1(exercise, rank, world_size, report):
    """Whether a file is open before the workers start, and what the workers read."""
    path = shared_folder(rank) / f"rank{rank}.h5"
    exercise.write(path, 32)
    dataset = exercise.Images(path)
    handles = h5py.h5f.get_obj_count(types=h5py.h5f.OBJ_FILE)
    try:
        pickle.loads(pickle.dumps(dataset))
        error = None
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not report.no_error("sending the data set to a worker:", error):
        return
    # Forked workers that share an open file may read anything.
    if report.equal("files that are open before the workers start:", handles, 0):
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        values = [int(image.max()) for batch in loader for image in batch]
        right = sum(value == place for place, value in enumerate(values))
        text = f"images that two workers read as they are: {right}"
        report(right == len(values) == 32, f"{text} (right: 32)")


def check_11_2(exercise, rank, world_size, report):
    """How train() ends on each rank, and the batches of 10 and of 12 chunks."""
    plans = {}
    for chunks in (10, 12):
        plans[chunks] = [part.tolist() for part in exercise.batches(chunks, rank, world_size)]
    steps, error = attempt(exercise.train, 10, rank, world_size)
    report.no_error("training ended with", error)
    return plans, steps, error


def compare_11_2(seen, report):
    if any(error for *_, error in seen):
        return
    for chunks in (10, 12):
        fair = chunks // len(seen)
        for rank, (plans, steps, _) in enumerate(seen):
            text = f"rank {rank}: {len(plans[chunks])} batches of {chunks} chunks"
            report(len(plans[chunks]) == fair, f"{text} (right: {fair})")
            if chunks == 10:
                report(steps == fair, f"rank {rank}: {steps} steps of training (right: {fair})")
        numbers = [number for plans, *_ in seen for batch in plans[chunks] for number in batch]
        twice = len(numbers) - len(set(numbers))
        report.equal(f"all ranks: numbers that came twice from {chunks} chunks:", twice, 0)


def check_11_3(exercise, rank, world_size, report):
    """The images of stream() in two epochs, their order, and the chunks it reads."""
    orders = []
    for epoch in (0, 1):
        file = exercise.File(4 * world_size, 8)
        images = [int(image) for image in exercise.stream(file, epoch, rank, world_size)]
        report(len(images) == 32, f"{len(images)} images in epoch {epoch} (right: 32)")
        report(file.reads <= 4, f"chunks read in epoch {epoch}: {file.reads} (limit 4)")
        # In order, the next image has the next number: 7 of 8 times within a chunk.
        follow = sum(y == x + 1 for x, y in itertools.pairwise(images))
        text = f"images that follow the one before them in the file: {follow}"
        report(follow < 16, f"{text} (limit 15)")
        orders.append(images)
    text = "the order of epoch 0" if orders[0] == orders[1] else "a new order"
    report(orders[0] != orders[1], f"epoch 1 has {text} (right: a new order)")
    return orders


def compare_11_3(seen, report):
    for epoch in (0, 1):
        visits = [image for orders in seen for image in orders[epoch]]
        count = 32 * len(seen)
        once = sum(visits.count(image) == 1 for image in range(count))
        report.equal(f"all ranks: images seen exactly once in epoch {epoch}:", once, count)


def check_11_4(exercise, rank, world_size, report):
    """Which images of train() come again: within a rank, between ranks, between epochs.

    It's a capstone, so it tells only symptoms: images that come again where they shouldn't.
    """
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return exercise.train()[1]


def compare_11_4(seen, report):
    for rank, (first, _) in enumerate(seen):
        again = len(first) - len(set(first))
        text = f"{again} of {len(first)} images of epoch 0 came again on rank {rank}"
        report(again == 0, f"within a rank: {text} (right: 0)")
    for rank, other in itertools.combinations(range(len(seen)), 2):
        common = len(set(seen[rank][0]) & set(seen[other][0]))
        if common:
            text = f"{common} images of epoch 0 on both rank {rank} and rank {other}"
            report(False, f"between ranks: {text} (right: 0)")
    same = any(first == second for first, second in seen)
    text = "the order of epoch 0" if same else "a new order"
    report(not same, f"between epochs: epoch 1 has {text} (right: a new order)")
    images = [image for first, _ in seen for image in first]
    report(len(images) == 512, f"all ranks: {len(images)} images in epoch 0 (right: 512)")
    different = len(set(images))
    text = f"all ranks: {different} different images in epoch 0"
    report(different == 512, f"{text} (right: 512)")
