"""Exercise 4.4: the images that my_part() gives to each rank, in two epochs, of 20 and of 21."""

from checks.common import short


def look(exercise, rank, world_size):
    parts = [exercise.my_part(20, epoch, rank, world_size).tolist() for epoch in range(2)]
    return parts, exercise.my_part(21, 0, rank, world_size).tolist()


def judge(seen):
    for rank, (parts, more) in enumerate(seen):
        for count, part in ((20, parts[0]), (21, more)):
            fair = count // len(seen)
            yield len(part) == fair, f"rank {rank}: {len(part)} of {count} images; fair is {fair}"
        yield parts[0] != parts[1], f"rank {rank}: images {short(parts[0])}, then {short(parts[1])}"
        mixed = any(x > y for x, y in zip(parts[0], parts[0][1:]))
        yield mixed, f"rank {rank}: {'shuffled' if mixed else 'not shuffled'}"
    for epoch in range(2):
        visits = [image for parts, _ in seen for image in parts[epoch]]
        twice = len(visits) - len(set(visits))
        yield twice == 0, f"all ranks: {twice} images went to more than one rank in epoch {epoch}"
    yield set(visits) <= set(range(20)), "all ranks: only images that there are"
