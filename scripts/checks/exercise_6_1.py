"""Exercise 6.1: the parameters after train(), those of the other ranks and those of one process."""

from checks.common import flat, gap


def look(exercise, rank, world_size):
    model, losses = exercise.train(rank, world_size)
    alone, _ = exercise.train(0, 1)
    return flat(model), flat(alone), losses[[0, -1]].tolist()


def judge(seen):
    for rank, (mine, alone, losses) in enumerate(seen):
        first, last = losses
        yield last < first, f"rank {rank}: loss {first:.4f} at first, {last:.4f} at last"
        far = gap(mine, seen[0][0])
        yield far < 1e-6, f"rank {rank}: its parameters differ from rank 0's by up to {far:.2g}"
        far = gap(mine, alone)
        yield far < 1e-5, f"rank {rank}: parameters within {far:.1g} of those of one process"
