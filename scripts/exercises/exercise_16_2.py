"""Exercise 16.2: the parameters after train(), beside one process's, and how much was sent."""

from exercises.common import compared, flat


def look(exercise, rank, world_size):
    import torch

    mine, messages = exercise.train(rank, world_size, 4)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    points = torch.linspace(-2, 2, 64 * world_size)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in points.split(16 * world_size):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), 3 * x - 1).backward()
        optimizer.step()
    return mine, flat(model), messages


def judge(seen):
    for rank, (mine, right, messages) in enumerate(seen):
        holds, words = compared(mine, right)
        yield holds, f"rank {rank}: parameters {words}"
        text = f"rank {rank}: {messages} messages for 4 steps of the optimizer"
        yield messages == 4, f"{text} (right: 4)"
