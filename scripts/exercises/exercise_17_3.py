"""Exercise 17.3: how many of Adam's numbers a rank keeps, and its parameters after 20 steps."""

import math

from exercises.common import compared, flat


def plain_adam(steps):
    """Return the model that one process gets with all points and the whole of Adam."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.linspace(-2, 2, 32)[:, None]
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(x), x.sin()).backward()
        adam.step()
    return model


def look(exercise, rank, world_size):
    model, optimizer = exercise.train(20)
    return exercise.states(optimizer.inner), flat(model), flat(plain_adam(20))


def judge(seen):
    most = 2 * math.ceil(193 / len(seen))  # two averages of the longest part
    for rank, (numbers, parameters, right) in enumerate(seen):
        text = f"rank {rank}: keeps {numbers} of the 386 numbers of Adam's states"
        yield numbers <= most, f"{text} (limit {most})"
        holds, words = compared(parameters, right)
        yield holds, f"rank {rank}: parameters after 20 steps: {words}"
