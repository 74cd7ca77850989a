"""Exercise 8.1: the loss of train(), its learning rate and global batch, here and alone."""

from exercises.common import compared


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
        text = f"rank {rank}: loss {loss:.2g} after the epoch, alone {alone[2]:.2g}"
        yield loss < 1e-4, f"{text} (limit 0.0001)"
        if loss < 1e-4:
            holds, words = compared([lr], [alone[1] * batch / alone[0]])
            yield holds, f"rank {rank}: with a global batch of {batch} the learning rate is {words}"
