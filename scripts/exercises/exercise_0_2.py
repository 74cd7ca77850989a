"""Exercise 0.2: how report() ends on each rank, and what it prints there."""

import contextlib
import io
import time
from datetime import timedelta

from exercises.common import attempt, ranks


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=3))
    images = torch.tensor(500.0 + 7 * rank)
    printed = io.StringIO()
    begin = time.monotonic()
    dist.barrier()
    with contextlib.redirect_stdout(printed):
        _, error = attempt(exercise.report, images, group)
    return error, printed.getvalue().strip(), time.monotonic() - begin


def judge(seen):
    total = sum(500 + 7 * rank for rank in range(len(seen)))
    for rank, (error, _, seconds) in enumerate(seen):
        text = f"after {seconds:.0f} s: {error or 'no error'} (right: no error)"
        yield not error, f"rank {rank}: report() ended {text}"
    if not any(error for error, _, _ in seen):
        printed = [text for _, text, _ in seen]
        yield f"{total:g}" in printed[0], f"rank 0: printed {printed[0]!r} (right: {total:g})"
        loud = ranks(printed[1:], bool)
        yield not loud, f"other ranks that printed something: {len(loud)} (right: 0)"
