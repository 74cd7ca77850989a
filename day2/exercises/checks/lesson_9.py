from datetime import timedelta

import torch
import torch.distributed as dist
from exercises.common import Fact, attempt, gather, noted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def check_9_1(exercise, rank, world_size):
    within = exercise.make_nodes(2)
    reads = noted(exercise, "read")
    labels, error = attempt(exercise.load_labels, within)
    yield Fact("labels", error or labels)
    node = rank // 2
    readers = sum(gather(len(reads))[2 * node : 2 * node + 2])
    yield Fact(f"ranks of node {node} that have read the labels:", readers)


class Sizes(TorchDispatchMode):
    """In a with statement: note in which group this rank sends how much.

    words: {name of a group: word}. seen: (word, bytes that one rank gives) of each.
    """

    def __init__(self, words):
        super().__init__()
        self.words, self.seen = words, []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if "c10d" in operation.namespace:
            parts = [
                [x.nbytes for x in tree_leaves(y) if torch.is_tensor(x)]
                for y in arguments
            ]
            size = min(sum(part) for part in parts if part)
            words = map(self.word_of, arguments)
            self.seen += [(word, size) for word in words if word]
        return operation(*arguments, **(options or {}))

    def word_of(self, argument):
        """Return the word of a group, as operations take it; None if it's no group."""
        if isinstance(argument, str):
            return self.words.get(argument)
        is_object = isinstance(argument, torch.ScriptObject)
        if is_object and "ProcessGroup" in str(argument._type()):
            name = dist.ProcessGroup.unbox(argument).group_name
            return self.words.get(name, "others")
        return None


def check_9_2(exercise, rank, world_size):
    # Not all are positive, and float32 has too few digits for them.
    mine = torch.tensor([1.1 + rank, -10.0 * rank * rank], dtype=torch.float64)
    mine = mine.repeat(100)
    within, between, leader = exercise.make_groups(2)
    words = {dist.group.WORLD.group_name: "all", within.group_name: "within"}
    if between:
        words[between.group_name] = "between"
    value = mine.clone()
    with Sizes(words) as messages:
        exercise.sum_over_nodes(value, within, between, leader)
    yield Fact("sum", value, close=1e-12)
    used = sorted({word for word, _ in messages.seen})
    yield Fact("groups of its collectives:", " and ".join(used))
    sizes = [size for word, size in messages.seen if word == "between"]
    largest, most = max(sizes, default=0), 1.5 * value.nbytes
    yield Fact("bytes of its largest message between nodes:", largest, most=most)
    if any(gather(largest > most or not {*used} <= {"within", "between"})):
        return  # with other nodes it may wait for ever
    limit = timedelta(seconds=20)
    nodes = [[0], [1, 2, 3]]
    within, _ = dist.new_subgroups_by_enumeration(nodes, timeout=limit)
    between = dist.new_group([0, 1], timeout=limit)
    value = mine.clone()
    exercise.sum_over_nodes(
        value, within, between if rank < 2 else None, leader=min(rank, 1)
    )
    yield Fact("sum of nodes of one rank and of three:", value, close=1e-12)
