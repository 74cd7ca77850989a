from itertools import accumulate

import torch
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
    idle, most = 2 * world_size * (world_size - 1), world_size - rank
    numbers = (2, 5, 8)
    yield from run_schedule(exercise, schedule, numbers, most, idle, rank, world_size)
    for stages in (2, 3, 8):
        held = [holds(schedule(stage, stages, 8)) for stage in range(stages)]
        over = sum(most > stages - stage for stage, most in enumerate(held))
        yield Fact(f"stages of {stages} that hold more than they may:", over, most=0)


def holds(todo):
    """Return how many micro-batches a stage holds at most, by its list."""
    return max(accumulate(1 if what == "F" else -1 for what, *_ in todo))


def check_17_3(exercise, rank, world_size):
    schedule, idle = exercise.zero_bubble, world_size * (world_size - 1)
    return run_schedule(exercise, schedule, (5, 8), world_size, idle, rank, world_size)


def check_17_4(exercise, rank, world_size):
    schedule, idle = exercise.interleaved, 2 * world_size * (world_size - 1)
    most = (3 * world_size - 1) / 2
    return run_schedule(
        exercise, schedule, (16, 8), most, idle, rank, world_size, each=2
    )


def run_schedule(
    exercise, schedule, numbers, most, most_idle, rank, world_size, each=1
):
    """The idle slots, micro-batches that are held, and gradients beside one process.

    numbers: of micro-batches. most: how many it may hold. each: stages on a rank.
    """
    x = torch.linspace(-1, 1, 1280).reshape(80, 16)
    y = x.flip(0)
    whole = torch.nn.Sequential(*map(exercise.build_stage, range(each * world_size)))
    torch.nn.functional.mse_loss(whole(x), y).backward()
    for number in numbers:
        stages = map(exercise.build_stage, range(rank, each * world_size, world_size))
        own = torch.nn.Sequential(*stages)
        _, log = exercise.train_step(own, schedule(rank, world_size, number), x, y)
        idle = sum(row.count("..") for row in exercise.slots(gather(log)))
        what = f"{number} micro-batches: idle slots of all stages:"
        yield Fact(what, idle, most=most_idle)
        held = max(held for *_, held in log) / each
        yield Fact(f"of {number} micro-batches it holds at most", held, most=most)
        right = gradients(whole[rank::world_size])
        yield Fact(f"{number} micro-batches: gradients", gradients(own), right=right)
