"""Exercise 0.1: what mean() returns on each rank, and whether it changes the tensor it gets."""

from exercises.common import compared, short


def look(exercise, rank, world_size):
    import torch

    value = torch.tensor([float(rank), 10.0 * rank * rank])
    return exercise.mean(value).tolist(), value.tolist()


def judge(seen):
    numbers = range(len(seen))
    expected = [sum(numbers) / len(seen), sum(10 * n * n for n in numbers) / len(seen)]
    for rank, (result, value) in enumerate(seen):
        own = [rank, 10.0 * rank * rank]
        holds, words = compared(result, expected)
        yield holds, f"rank {rank}: mean({short(own)}) gave {words}"
        holds, words = compared(value, own)
        yield holds, f"rank {rank}: afterwards the tensor itself holds {words}"
