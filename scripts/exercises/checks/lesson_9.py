import torch
import torch.distributed as dist
from exercises.common import attempt, noted, short


def check_9_1(exercise, rank, world_size, report):
    within = exercise.make_nodes(2)
    reads = noted(exercise, "read")
    labels, error = attempt(exercise.load_labels, within)
    text = error or f"labels {short(labels.tolist())}"
    report(not error and labels.tolist() == [5, 0, 4, 1], f"{text} (right: labels 5, 0, 4, 1)")
    seen = yield len(reads)
    for node in range(len(seen) // 2):
        reads = sum(seen[2 * node : 2 * node + 2])
        report.equal(f"node {node}: ranks that have read the labels:", reads, 1)


def check_9_2(exercise, rank, world_size, report):
    within, between, leader = exercise.make_groups(2)
    names = ("all_reduce", "reduce", "broadcast", "all_gather")
    collectives = [noted(dist, name) for name in names]
    values = [[1.0 + n, 10.0 * n * n] for n in range(world_size)]
    value = torch.tensor(values[rank])
    exercise.sum_over_nodes(value, within, between, leader)
    if report.numbers("", value, [sum(column) for column in zip(*values)]):
        groups = {options.get("group") for calls in collectives for _, options in calls}
        words = {within: "within", between: "between", None: "all"}
        used = " and ".join(sorted(words[group] for group in groups))
        right = "between and within" if rank % 2 == 0 else "within"
        report.equal("groups of its collectives:", used or "none", right)
