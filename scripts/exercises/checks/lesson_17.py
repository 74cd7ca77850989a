from itertools import accumulate

import torch
from exercises.common import gradients, train_alone


def check_17_2(exercise, rank, world_size, report):
    x = torch.linspace(-1, 1, 1024).reshape(64, 16)
    y = x.flip(0)
    whole = torch.nn.Sequential(*(exercise.build_stage(stage) for stage in range(world_size)))
    right = train_alone(whole, [(x, y)] * 10, lr=0.5)
    passes = []  # 1: forward, -1: backward

    def note(stage, inputs, output):
        if output.requires_grad:
            passes.append(1)
            output.register_hook(lambda gradient: passes.append(-1))

    stage = exercise.build_stage(rank)
    stage.register_forward_hook(note)
    losses = exercise.train(stage, x, y, 10)
    if rank == world_size - 1:  # the others know none
        report.numbers("losses:", losses, right)
    report.numbers("weights:", stage, whole[rank])
    # The last step only: before the first one, the library may try a stage out.
    most = max(accumulate(passes[-16:]), default=0)
    report.equal("micro-batches held at most:", most, world_size - rank)


def check_17_1(exercise, rank, world_size, report):
    idle = 2 * world_size * (world_size - 1)
    most = world_size - rank
    schedule = exercise.one_forward_one_backward
    run_schedule(exercise, schedule, (2, 5, 8), most, idle, rank, world_size, report)


def check_17_3(exercise, rank, world_size, report):
    idle = world_size * (world_size - 1)
    schedule = exercise.zero_bubble
    run_schedule(exercise, schedule, (5, 8), world_size, idle, rank, world_size, report)


def check_17_4(exercise, rank, world_size, report):
    idle = 2 * world_size * (world_size - 1)
    most = (3 * world_size - 1) / 2
    schedule = exercise.interleaved
    run_schedule(exercise, schedule, (16, 8), most, idle, rank, world_size, report, each=2)


def run_schedule(exercise, schedule, numbers, most, most_idle, rank, world_size, report, each=1):
    """Gradients beside one process, micro-batches that are held, and the idle slots.

    numbers: of micro-batches. most: how many of them it may hold. each: stages on a rank.
    """
    x = torch.linspace(-1, 1, 1280).reshape(80, 16)
    y = x.flip(0)
    whole = torch.nn.Sequential(*map(exercise.build_stage, range(each * world_size)))
    torch.nn.functional.mse_loss(whole(x), y).backward()
    for number in numbers:
        stages = map(exercise.build_stage, range(rank, each * world_size, world_size))
        own = torch.nn.Sequential(*stages)
        todo = schedule(rank, world_size, number)
        _, log = exercise.train_step(own, todo, x, y)
        what = f"{number} micro-batches: gradients"
        report.numbers(what, gradients(own), gradients(whole[rank::world_size]), 1e-6)
        held = max(held for *_, held in log) / each
        report.at_most(f"of {number} micro-batches it holds at most", held, most)
        table = exercise.slots(exercise.gather(log))
        idle = sum(row.count("..") for row in table)
        if rank == 0:
            what = f"{number} micro-batches: idle slots of all stages:"
            report.at_most(what, idle, most_idle)
