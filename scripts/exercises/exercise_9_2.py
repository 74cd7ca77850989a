"""Exercise 9.2: what sum_over_nodes() gives on each rank, and the groups that it used for it."""

from exercises.common import compared


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

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
    return value.tolist(), groups


def judge(seen):
    numbers = range(len(seen))
    expected = [sum(1.0 + n for n in numbers), sum(10.0 * n * n for n in numbers)]
    for rank, (value, groups) in enumerate(seen):
        right, words = compared(value, expected)
        yield right, f"rank {rank}: {words}"
        if right:
            used = ", ".join(groups) or "none"
            leads = rank % 2 == 0
            allowed = "within and between" if leads else "within"
            yield (
                "all" not in groups and ("between" in groups) == leads,
                f"rank {rank}: its collectives were in the groups {used} (right: {allowed})",
            )
