import torch
from exercises.common import Fact


def check_19_1(exercise, rank, world_size):
    # One row that all ranks have used, and one that only this rank has used, twice.
    rows = torch.tensor([0, 1 + rank, 1 + rank])
    values = torch.arange(6.0).view(3, 2) + 10 * rank
    result = exercise.average_rows(rows, values)
    yield Fact("rows that it has gradients of:", len(result[0].unique()))
    yield Fact("all rows:", torch.zeros(world_size + 1, 2).index_add(0, *result))
