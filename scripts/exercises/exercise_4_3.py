"""Exercise 4.3: the parameters of all ranks after train(), and the loss over all points."""

from exercises.common import flat, gap


def look(exercise, rank, world_size):
    import torch

    x = torch.linspace(-2, 2, 32)[:, None]
    y = torch.sin(x)
    model = exercise.train(x, y, rank, world_size)
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    return flat(model), loss, y.square().mean().item()


def judge(seen):
    first = seen[0][0]
    for rank, (parameters, loss, begin) in enumerate(seen):
        far = gap(parameters, first)
        same = far <= 1e-6
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.2g}"
        yield same, f"{text} (limit 1e-06)"
        if same:
            yield loss < begin / 20, f"rank {rank}: loss {loss:.2g} (limit {begin / 20:.2g})"
