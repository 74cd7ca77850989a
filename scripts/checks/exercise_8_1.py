"""Exercise 8.1: the learning rate, the global batch and the loss of train(), here and alone."""

from checks.common import close


def look(exercise, rank, world_size):
    import torch

    points = exercise.make_points()
    x, y = points.tensors
    results = []
    for place, size in ((rank, world_size), (0, 1)):
        model, steps, lr = exercise.train(points, place, size)
        loss = torch.nn.functional.mse_loss(model(x), y).item()
        results.append((round(len(x) / steps), lr, loss))
    return results


def judge(seen):
    for rank, (together, alone) in enumerate(seen):
        batch, lr, loss = together
        rule = alone[1] * batch / alone[0]
        yield (
            close([lr], [rule]),
            f"rank {rank}: learning rate {lr:g} with a global batch of {batch}; one process has "
            f"{alone[1]:g} with {alone[0]}, so the linear rule says {rule:g}",
        )
        yield loss < 1e-4, f"rank {rank}: loss {loss:.2g} after the epoch; alone {alone[2]:.2g}"
