"""What the check of each exercise of lesson 9 does."""

import torch
import torch.distributed as dist
from exercises.common import attempt, noted, short


def check_9_1(exercise, rank, world_size, report):
    """The labels that each rank gets from load_labels(), and which ranks read them."""
    within = exercise.make_nodes(2)
    reads = noted(exercise, "read")
    labels, error = attempt(exercise.load_labels, within)
    return error, error or labels.tolist(), len(reads)


def compare_9_1(seen, report):
    for rank, (error, labels, _) in enumerate(seen):
        text = f"rank {rank}, node {rank // 2}: {error or f'labels {short(labels)}'}"
        report(labels == [5, 0, 4, 1], f"{text} (right: labels 5, 0, 4, 1)")
    for node in range(len(seen) // 2):
        reads = sum(mine[2] for mine in seen[2 * node : 2 * node + 2])
        report.equal(f"node {node}: ranks that have read the labels:", reads, 1)


def check_9_2(exercise, rank, world_size, report):
    """What sum_over_nodes() gives on each rank, and the groups that it used for it."""
    within, between, leader = exercise.make_groups(2)
    groups = []

    def noting(function):
        def call(tensor, *arguments, group=None, **options):
            place = "within" if group is within else "all" if group is None else "between"
            groups.append(place)
            return function(tensor, *arguments, group=group, **options)

        return call

    for name in ("all_reduce", "reduce", "broadcast", "all_gather"):
        setattr(dist, name, noting(getattr(dist, name)))
    value = torch.tensor([1.0 + rank, 10.0 * rank * rank])
    exercise.sum_over_nodes(value, within, between, leader)
    numbers = range(world_size)
    expected = [sum(1.0 + n for n in numbers), sum(10.0 * n * n for n in numbers)]
    if report.numbers("", value.tolist(), expected):
        leads = rank % 2 == 0
        text = f"its collectives were in the groups {', '.join(groups) or 'none'}"
        text = f"{text} (right: {'within and between' if leads else 'within'})"
        report("all" not in groups and ("between" in groups) == leads, text)
