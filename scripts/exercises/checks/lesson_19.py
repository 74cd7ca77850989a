"""What the check of each exercise of lesson 19 does."""

import torch
from exercises.common import shared_folder


def check_19_1(exercise, rank, world_size, report):
    """The rows and the gradients that average_rows() gives, row by row."""
    # One row that all ranks have used, and one that only this rank has used, twice.
    rows = torch.tensor([0, 1 + rank, 1 + rank])
    values = torch.arange(6.0).view(3, 2) + 10 * rank
    result = exercise.average_rows(rows.clone(), values.clone())
    return [x.tolist() for x in (rows, values, *result)]


def total(row, parts):
    """Return the sum of what the parts, (rows, values), have for a row."""
    found = [value for rows, values in parts for r, value in zip(rows, values) if r == row]
    return [sum(column) for column in zip(*found)]


def compare_19_1(seen, report):
    given = [(rows, values) for rows, values, _, _ in seen]
    count = sum(len(rows) for rows, _ in given)
    for rank, (_, _, rows, values) in enumerate(seen):
        text = f"rank {rank}: has the gradients of {len(rows)} rows"
        report(len(rows) == count, f"{text} (right: {count})")
        for row in range(len(seen) + 1):
            right = [x / len(seen) for x in total(row, given)]
            report.numbers(f"rank {rank}: row {row}:", total(row, [(rows, values)]), right)


def check_19_2(exercise, rank, world_size, report):
    """The mean of 48 MB of ratings, and how much the memory grows meanwhile."""
    path = shared_folder(rank) / f"rank{rank}"
    exercise.write(path)
    ratings = exercise.Ratings(path)
    before = exercise.peak_memory()
    mean = exercise.mean(ratings)
    path.unlink()
    grown = exercise.peak_memory() - before
    report(mean == 2.5, f"mean {mean:g} (right: 2.5)")
    text = f"its memory grew by {grown:.0f} MB while it read 48 MB in parts of 4"
    report(grown < 16, f"{text} (limit 16 MB)")
