"""Exercise 11.3: the images of stream() in two epochs, their order, and the chunks it reads."""


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
            yield fair, f"rank {rank}: {len(images)} images in epoch {epoch}; fair is 32"
            text = f"rank {rank}: reads {reads} chunks for {len(images)} images in epoch {epoch}"
            yield reads <= 4, f"{text}; a chunk has 8"
        mixed = all(images != sorted(images) for images, _ in epochs)
        # A chunk's images in order follow each other: 7 of 8 times the next one is one more.
        pairs = list(zip(epochs[0][0], epochs[0][0][1:]))
        mixed = mixed and sum(y == x + 1 for x, y in pairs) < len(pairs) / 2
        yield mixed, f"rank {rank}: {'shuffled' if mixed else 'not shuffled'} within the chunks"
        new = epochs[0][0] != epochs[1][0]
        yield new, f"rank {rank}: {'another' if new else 'the same'} order in epoch 1"
    for epoch in (0, 1):
        visits = sorted(image for epochs in seen for image in epochs[epoch][0])
        once = visits == list(range(32 * len(seen)))
        yield once, f"all ranks: each image once in epoch {epoch}: {'yes' if once else 'no'}"
