"""Exercise 8.3: the points, the first step and the report of train(), each symptom by itself.

It's a capstone, so it tells only symptoms, each one whatever the other faults do.
"""

from exercises.common import compared


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss

    points = exercise.make_points()
    original, forwards = exercise.make_model, []

    def make_model():
        model = original()
        model.register_forward_pre_hook(lambda _, inputs: forwards.append(inputs[0].clone()))
        return model

    exercise.make_model = make_model
    step, moves = torch.optim.SGD.step, []

    def noting(optimizer, *arguments, **options):
        weights = optimizer.param_groups[0]["params"][0]
        before, rate = weights.detach().clone(), optimizer.param_groups[0]["lr"]
        step(optimizer, *arguments, **options)
        moves.append(((before - weights.detach()).norm().item(), rate))

    torch.optim.SGD.step = noting
    exercise.train(points, rank, world_size)
    torch.optim.SGD.step = step
    # The gradient of the batches that the ranks really had in their first step.
    table = {tuple(x.tolist()): y for x, y in zip(*points.tensors)}
    parts = [None] * world_size
    dist.all_gather_object(parts, [tuple(x) for x in forwards[0].tolist()])
    torch.manual_seed(0)
    model = original()
    x = torch.tensor([x for part in parts for x in part])
    mse_loss(model(x), torch.stack([table[tuple(row)] for row in x.tolist()])).backward()
    way, rate = moves[0]
    ratio = way / (rate * next(model.parameters()).grad.norm().item())
    steps = len(moves) // exercise.EPOCHS
    visits = [tuple(x) for x in torch.cat(forwards[:steps]).tolist()]
    report = exercise.over_all_ranks(torch.tensor([1.0 + rank]), world_size).item()
    return steps, visits, ratio, rate, report


def judge(seen):
    size, steps = len(seen), max(mine[0] for mine in seen)
    points = len({point for _, points, _, _, _ in seen for point in points})
    text = f"work: {2 * steps} steps on each of {size} ranks, right: {128 // size}"
    yield (
        steps == 64 // size and points == 1024,
        f"{text}; points in the first epoch: {points}, right: 1024",
    )
    ratios = [ratio for _, _, ratio, _, _ in seen]
    far = max(ratios, key=lambda ratio: abs(ratio - 1))
    text = f"step: the first one is {far:.2f} times as long as gradient and rate say"
    yield abs(far - 1) < 0.01, f"{text} (right: 1, limit 0.01)"
    holds, words = compared([seen[0][3]], [0.05 * size])
    yield holds, f"step: the learning rate on {size} ranks is {words}"
    numbers = ", ".join(str(1 + rank) for rank in range(size))
    holds, words = compared([seen[0][4]], [(size + 1) / 2])
    yield holds, f"report: losses {numbers} of the ranks are reported as {words}"
