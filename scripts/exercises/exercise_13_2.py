"""Exercise 13.2: how far step() moves a weight with a short gradient, and with a long one."""

from exercises.common import compared

SIZES = (0.5, 8.0)  # the lengths of the true gradients


def look(exercise, rank, world_size):
    import torch

    moved = []
    for size in SIZES:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, size / 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        scaler = torch.amp.GradScaler("cpu")
        exercise.step(model, optimizer, scaler, torch.ones(1, 1), torch.zeros(1, 1))
        moved.append(size / 2 - model.weight.item())
    return moved


def judge(seen):
    for rank, moved in enumerate(seen):
        for size, way in zip(SIZES, moved):
            holds, words = compared([way], [min(size, 1.0)])  # longer ones are clipped
            yield holds, f"rank {rank}: a gradient of length {size:g} moved the weight by {words}"
