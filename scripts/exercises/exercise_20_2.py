"""Exercise 20.2: losses and weights beside one process, and the micro-batches that are held."""

from itertools import accumulate

from exercises.common import compared, flat


def look(exercise, rank, world_size):
    import torch
    import torch.nn.functional as F

    x = torch.linspace(-1, 1, 1024).reshape(64, 16)
    y = x.flip(0)
    whole = torch.nn.Sequential(*(exercise.build_stage(stage) for stage in range(world_size)))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    right = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.mse_loss(whole(x), y)
        loss.backward()
        optimizer.step()
        right.append(loss.item())
    passes = []  # 1: forward, -1: backward

    def note(stage, inputs, output):
        if output.requires_grad:
            passes.append(1)
            output.register_hook(lambda gradient: passes.append(-1))

    stage = exercise.build_stage(rank)
    stage.register_forward_hook(note)
    losses = exercise.train(stage, x, y, 10)
    # The last step only: before the first one, the library may try a stage out.
    most = max(accumulate(passes[-16:]), default=0)
    return losses, right, flat(stage), flat(whole[rank]), most


def judge(seen):
    for rank, (losses, right, weights, alone, most) in enumerate(seen):
        if rank == len(seen) - 1:  # the others know none
            holds, words = compared(losses, right)
            yield holds, f"rank {rank}: losses: {words}"
        holds, words = compared(weights, alone)
        yield holds, f"rank {rank}: weights: {words}"
        text = f"rank {rank}: micro-batches held at most: {most}"
        yield most == len(seen) - rank, f"{text} (right: {len(seen) - rank})"
