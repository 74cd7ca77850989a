from itertools import accumulate

import torch
from exercises.common import Fact, gather, gradients


def check_17_2(exercise, rank, world_size):
    x = torch.linspace(-1, 1, 1024).reshape(64, 16)
    passes = []  # 1: forward, -1: backward

    def note(stage, inputs, output):
        if output.requires_grad:
            passes.append(1)
            output.register_hook(lambda gradient: passes.append(-1))

    stage = exercise.build_stage(rank)
    stage.register_forward_hook(note)
    losses = exercise.train(stage, x, x.flip(0), 10)
    yield Fact("losses:", losses if rank == world_size - 1 else None)  # the others know none
    yield Fact("weights:", stage)
    # The last step only: before the first one, the library may try a stage out.
    most = max(accumulate(passes[-16:]), default=0)
    yield Fact("micro-batches held at most:", most, right=world_size - rank)


def check_17_3(exercise, rank, world_size):
    return run_schedule(exercise, exercise.zero_bubble, 1, world_size, rank, world_size)


def check_17_4(exercise, rank, world_size):
    most = (3 * world_size - 1) / 2
    return run_schedule(exercise, exercise.interleaved, 2, most, rank, world_size)


def run_schedule(exercise, schedule, each, most, rank, world_size):
    """The idle slots, micro-batches that are held, and gradients beside one process.

    each: stages on a rank. most: how many micro-batches it may hold.
    """
    x = torch.linspace(-1, 1, 1280).reshape(80, 16)
    y = x.flip(0)
    whole = torch.nn.Sequential(*map(exercise.build_stage, range(each * world_size)))
    torch.nn.functional.mse_loss(whole(x), y).backward()
    for number in (5 if each == 1 else 16, 8):
        stages = map(exercise.build_stage, range(rank, each * world_size, world_size))
        own = torch.nn.Sequential(*stages)
        _, log = exercise.train_step(own, schedule(rank, world_size, number), x, y)
        idle = sum(row.count("..") for row in exercise.slots(gather(log)))
        what = f"{number} micro-batches: idle slots of all stages:"
        yield Fact(what, idle, most=each * world_size * (world_size - 1))
        held = max(held for *_, held in log) / each
        yield Fact(f"of {number} micro-batches it holds at most", held, most=most)
        right = gradients(whole[rank::world_size])
        yield Fact(f"{number} micro-batches: gradients", gradients(own), right=right)
