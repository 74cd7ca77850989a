"""Exercise 11.3: the images of stream() in two epochs, their order, and the chunks it reads."""

from itertools import pairwise


def look(exercise, rank, world_size):
    results = []
    for epoch in (0, 1):
        file = exercise.File(4 * world_size, 8)
        images = [int(image) for image in exercise.stream(file, epoch, rank, world_size)]
        results.append((images, file.reads))
    return results


def judge(seen):
    for rank, epochs in enumerate(seen):
        for epoch, (images, reads) in enumerate(epochs):
            fair = len(images) == 32
            yield fair, f"rank {rank}: {len(images)} images in epoch {epoch} (right: 32)"
            yield reads <= 4, f"rank {rank}: chunks read in epoch {epoch}: {reads} (limit 4)"
            # In order, the next image has the next number: 7 of 8 times within a chunk.
            follow = sum(y == x + 1 for x, y in pairwise(images))
            text = f"rank {rank}: images that follow the one before them in the file: {follow}"
            yield follow < 16, f"{text} (limit 15)"
        new = "a new order" if epochs[0][0] != epochs[1][0] else "the order of epoch 0"
        yield new == "a new order", f"rank {rank}: epoch 1 has {new} (right: a new order)"
    for epoch in (0, 1):
        visits = [image for epochs in seen for image in epochs[epoch][0]]
        count = 32 * len(seen)
        once = sum(visits.count(image) == 1 for image in range(count))
        text = f"all ranks: images seen exactly once in epoch {epoch}: {once}"
        yield once == count, f"{text} (right: {count})"
