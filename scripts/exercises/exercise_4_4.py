"""Exercise 4.4: the images that my_part() gives to each rank, in two epochs, of 20 and of 21."""

from exercises.common import short


def look(exercise, rank, world_size):
    parts = [exercise.my_part(20, epoch, rank, world_size).tolist() for epoch in range(2)]
    return parts, exercise.my_part(21, 0, rank, world_size).tolist()


def judge(seen):
    for rank, (parts, more) in enumerate(seen):
        for count, part in ((20, parts[0]), (21, more)):
            fair = count // len(seen)
            yield len(part) == fair, f"rank {rank}: {len(part)} of {count} images (right: {fair})"
        text = f"rank {rank}: images {short(parts[0])}, then in epoch 1 {short(parts[1])}"
        yield parts[0] != parts[1], f"{text} (right: a new order)"
        falls = sum(x > y for x, y in zip(parts[0], parts[0][1:]))
        text = f"rank {rank}: images with a lower number than the one before: {falls}"
        yield falls > 0, f"{text} (right: 1 or more)"
    for epoch in range(2):
        visits = [image for parts, _ in seen for image in parts[epoch]]
        twice = len(visits) - len(set(visits))
        text = f"all ranks: images that came more than once in epoch {epoch}: {twice}"
        yield twice == 0, f"{text} (right: 0)"
    unknown = len(set(visits) - set(range(20)))
    yield unknown == 0, f"all ranks: numbers that belong to no image: {unknown} (right: 0)"
