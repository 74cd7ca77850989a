from itertools import accumulate
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import Fact, gather, gradients, noted


def check_17_2(exercise, rank, world_size):
    from torch.distributed.pipelining import Schedule1F1B

    steps = noted(Schedule1F1B, "step")
    x = torch.linspace(-1, 1, 1024).reshape(64, 16)
    rows = []  # in each forward pass
    passes = []  # 1: forward, -1: backward

    def note(stage, inputs, output):
        rows.append(len(output))
        if output.requires_grad:
            passes.append(1)
            output.register_hook(lambda gradient: passes.append(-1))

    stage = exercise.build_stage(rank)
    stage.register_forward_hook(note)
    losses = exercise.train(stage, x, x.flip(0), 10)
    yield Fact(
        "losses:", losses if rank == world_size - 1 else None
    )  # the others know none
    yield Fact("weights:", stage)
    # The last step only: before the first one, the library may try a stage out.
    most = max(accumulate(passes[-16:]), default=0)
    yield Fact("micro-batches held at most:", most, right=world_size - rank)
    yield Fact("rows of a micro-batch:", rows[-1:], right=[8])
    yield Fact("steps of the library's schedule:", len(steps), right=10)


def check_17_1(exercise, rank, world_size):
    schedule = exercise.one_forward_one_backward
    idle = 2 * world_size * (world_size - 1)
    yield from run_schedule(
        exercise, schedule, (2, 5, 8), lambda stage, stages: stages - stage, idle
    )
    for ranks in (2, 3, 4, 8):
        slots = []
        for number in (1, 4, 24):
            lists = [schedule(other, ranks, number) for other in range(ranks)]
            logs = [[(*what, 0) for what in todo] for todo in lists]
            with mock.patch.object(exercise, "LAYERS", ranks):  # a slot for each pass
                slots.append(sum(row.count("..") for row in exercise.slots(logs)))
        what = f"idle slots of {ranks} stages with 1, 4 and 24 micro-batches:"
        yield Fact(what, slots, right=3 * [2 * ranks * (ranks - 1)])


def check_17_3(exercise, rank, world_size):
    schedule, idle = exercise.zero_bubble, world_size * (world_size - 1)
    return run_schedule(exercise, schedule, (5, 8), lambda stage, stages: stages, idle)


def check_17_4(exercise, rank, world_size):
    schedule, idle = exercise.interleaved, 2 * world_size * (world_size - 1)
    return run_schedule(
        exercise, schedule, (16, 8), lambda rank, ranks: (3 * ranks - 1) / 2, idle, 2
    )


def run_schedule(exercise, schedule, numbers, may_hold, most_idle, each=1):
    """The idle slots, micro-batches that are held, and gradients beside one process.

    numbers: of micro-batches. may_hold(rank, ranks): how many it may hold. each: stages
    on a rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.linspace(-1, 1, 1280).reshape(80, 16)
    y = x.flip(0)
    whole = torch.nn.Sequential(*map(exercise.build_stage, range(each * world_size)))
    torch.nn.functional.mse_loss(whole(x), y).backward()
    for number in numbers:
        stages = map(exercise.build_stage, range(rank, each * world_size, world_size))
        own = torch.nn.Sequential(*stages)
        todo = schedule(rank, world_size, number)
        _, log = exercise.train_step(own, todo, x, y)
        idle = sum(row.count("..") for row in exercise.slots(gather(log)))
        what = f"{number} micro-batches: idle slots of all stages:"
        yield Fact(what, idle, most=most_idle)
        most = may_hold(rank, world_size)
        what = f"of {number} micro-batches it holds at most"
        yield Fact(what, holds(todo) / each, most=most)
        right = gradients(whole[rank::world_size])
        yield Fact(f"{number} micro-batches: gradients", gradients(own), right=right)
    for ranks in (2, 3, 8):
        over = sum(
            holds(schedule(other, ranks, 24)) / each > may_hold(other, ranks)
            for other in range(ranks)
        )
        yield Fact(f"ranks of {ranks} that hold more than they may:", over, most=0)


def holds(todo):
    """Return how many micro-batches are held at most, by the list of what a rank does.

    The last pass of each lets go of it: W where there are such, or B.
    """
    last = "W" if any("W" in what for what, *_ in todo) else "B"
    return max(accumulate((what == "F") - (last in what) for what, *_ in todo))
