"""Exercise 6.1: the parameters after train(), beside the other ranks' and one process's."""

from exercises.common import flat, gap


def look(exercise, rank, world_size):
    model, losses = exercise.train(rank, world_size)
    alone, _ = exercise.train(0, 1)
    return flat(model), flat(alone), losses[[0, -1]].tolist()


def judge(seen):
    for rank, (mine, alone, losses) in enumerate(seen):
        first, last = losses
        text = f"rank {rank}: loss {last:.4f} at the end"
        yield last < first, f"{text} (limit {first:.4f}, the first)"
        far = gap(mine, seen[0][0])
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.2g}"
        yield far <= 1e-6, f"{text} (limit 1e-06)"
        far = gap(mine, alone)
        text = f"rank {rank}: parameters within {far:.1g} of one process's"
        yield far <= 1e-5, f"{text} (limit 1e-05)"
