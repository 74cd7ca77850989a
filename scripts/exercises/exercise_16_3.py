"""Exercise 16.3: the weight of each rank after train(), and how many means were taken."""

from exercises.common import compared, flat


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    all_reduce, means = dist.all_reduce, []
    dist.all_reduce = lambda *given, **options: means.append(1) or all_reduce(*given, **options)
    mine = flat(exercise.train(rank))
    dist.all_reduce = all_reduce
    x = torch.linspace(-2, 2, 16)[:, None]
    shrink = 1 - 2 * 0.05 * x.square().mean().item()  # of the distance to the target, each step
    torch.manual_seed(0)
    weight = torch.nn.Linear(1, 1, bias=False).weight.item()
    target = (world_size + 1) / 2  # the mean of 1, 2, ...: all steps are linear
    return mine, [target + (weight - target) * shrink**20], len(means)


def judge(seen):
    for rank, (mine, right, means) in enumerate(seen):
        holds, words = compared(mine, right)
        yield holds, f"rank {rank}: weight {words}"
        if holds:
            yield means == 3, f"rank {rank}: the parameters were averaged {means} times (right: 3)"
