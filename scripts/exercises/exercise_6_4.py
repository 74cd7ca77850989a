"""Exercise 6.4: the weights just after load() and 10 steps later, and without a stop."""

from exercises.common import flat, gap, shared_folder


def look(exercise, rank, world_size):
    path = shared_folder(rank) / "checkpoint.pt"
    first = exercise.begin()
    losses = exercise.train(*first, 10)
    exercise.save(path, *first)
    stopped = flat(first[0])
    exercise.train(*first, 10)
    second = exercise.begin()
    exercise.load(path, *second)
    loaded = flat(second[0])
    exercise.train(*second, 10)
    return stopped, loaded, flat(first[0]), flat(second[0]), losses


def judge(seen):
    for rank, (stopped, loaded, straight, resumed, losses) in enumerate(seen):
        text = f"rank {rank}: loss {losses[-1]:.4f} after 10 steps"
        yield losses[-1] < losses[0], f"{text} (limit {losses[0]:.4f}, the first)"
        at_once, later = gap(stopped, loaded), gap(straight, resumed)
        yield at_once == 0, f"rank {rank}: weights after loading differ by {at_once:.2g} (limit 0)"
        text = f"rank {rank}: weights 10 steps later differ by {later:.2g}"
        yield later <= 1e-6, f"{text} (limit 1e-06)"
