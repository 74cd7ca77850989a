"""Exercise 11.4: which images of train() come again: within a rank, between ranks, between epochs.

It's a capstone, so it tells only symptoms: images that come again where they shouldn't.
"""

import itertools
import os


def look(exercise, rank, world_size):
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return exercise.train()[1]


def judge(seen):
    for rank, (first, _) in enumerate(seen):
        again = len(first) - len(set(first))
        text = f"{again} of {len(first)} images of epoch 0 came again on rank {rank}"
        yield again == 0, f"within a rank: {text} (right: 0)"
    for rank, other in itertools.combinations(range(len(seen)), 2):
        common = len(set(seen[rank][0]) & set(seen[other][0]))
        if common:
            text = f"{common} images of epoch 0 on both rank {rank} and rank {other}"
            yield False, f"between ranks: {text} (right: 0)"
    same = any(first == second for first, second in seen)
    text = "the order of epoch 0" if same else "a new order"
    yield not same, f"between epochs: epoch 1 has {text} (right: a new order)"
    images = [image for first, _ in seen for image in first]
    yield len(images) == 512, f"all ranks: {len(images)} images in epoch 0 (right: 512)"
    different = len(set(images))
    yield different == 512, f"all ranks: {different} different images in epoch 0 (right: 512)"
