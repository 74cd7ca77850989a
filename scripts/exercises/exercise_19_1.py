"""Exercise 19.1: what RowWise gives with a bias, and the losses of the ranks that share a model."""

from exercises.common import compared


def look(exercise, rank, world_size):
    import torch

    torch.manual_seed(1)
    linear = torch.nn.Linear(4, 2)
    x = torch.randn(1, 4)
    own = x.chunk(world_size, dim=1)[rank]
    right = linear(x).flatten().tolist()
    mine = exercise.RowWise(linear)(own).flatten().tolist()
    return mine, right, exercise.train(20, True), exercise.train(20, False)


def judge(seen):
    for rank, (mine, right, shared, alone) in enumerate(seen):
        holds, words = compared(mine, right)
        yield holds, f"rank {rank}: a layer with a bias gives {words}"
        if holds:
            holds, words = compared(shared[-1:], alone[-1:], 1e-5)
            yield holds, f"rank {rank}: loss in step 19 {words}"
