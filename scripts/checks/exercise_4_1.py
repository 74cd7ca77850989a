"""Exercise 4.1: the parameters after train(), those of one process, and what length is clipped."""

from checks.common import flat, gap, short


def look(exercise, rank, world_size):
    import torch

    original, lengths = torch.nn.utils.clip_grad_norm_, []

    def clip(parameters, *arguments, **options):
        lengths.append(original(parameters, *arguments, **options).item())

    torch.nn.utils.clip_grad_norm_ = clip
    x, y = exercise.make_points()
    model, losses = exercise.train(x, y, rank, world_size)
    torch.manual_seed(0)
    alone = torch.nn.Linear(x.shape[1], 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(len(losses)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(x), y).backward()
        original(alone.parameters(), 1.0)
        optimizer.step()
    return flat(model), flat(alone), lengths[:1]


def judge(seen):
    for rank, (mine, alone, _) in enumerate(seen):
        far = gap(mine, alone)
        yield far < 1e-3, f"rank {rank}: parameters within {far:.1g} of those of one process"
    first = [length for _, _, lengths in seen for length in lengths]
    same = len(first) == len(seen) and max(first) - min(first) < 1e-3
    yield same, f"all ranks: lengths of what is clipped in the first step: {short(first) or 'none'}"
