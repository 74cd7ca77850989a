"""Exercise 17.2: how many numbers Net keeps for backward, and whether its gradients are right."""


def look(exercise, rank, world_size):
    import torch

    torch.manual_seed(0)
    model, x = exercise.Net(), torch.randn(256, 32)
    numbers = exercise.kept(model, x)
    mine = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.nn.Sequential(*model.layers)(x).square().mean().backward()
    right = [parameter.grad for parameter in model.parameters()]
    return numbers, all(a is not None and torch.allclose(a, b) for a, b in zip(mine, right))


def judge(seen):
    for rank, (numbers, right) in enumerate(seen):
        into = 8 * 256 * 32  # what goes into the layers
        text = f"rank {rank}: numbers that are kept for backward: {numbers:,}"
        yield numbers == into, f"{text} (right: {into:,})"
        text = f"rank {rank}: the gradients are {'the same' if right else 'different'}"
        yield right, f"{text} (right: the same as when all is kept)"
