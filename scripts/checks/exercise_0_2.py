"""Exercise 0.2: which ranks call all_reduce in report(), and what each of them prints."""

import contextlib
import io
import time
from datetime import timedelta

from checks.common import attempt, names, ranks


@contextlib.contextmanager
def counted(name):
    """Count the calls of a collective, such as all_reduce: give a list of their lengths."""
    import torch.distributed as dist

    original, calls = getattr(dist, name), []

    def counting(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return original(tensor, *arguments, **options)

    setattr(dist, name, counting)
    try:
        yield calls
    finally:
        setattr(dist, name, original)


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=3))
    images = torch.tensor(500.0 + 7 * rank)
    printed = io.StringIO()
    begin = time.monotonic()
    dist.barrier()
    with counted("all_reduce") as calls, contextlib.redirect_stdout(printed):
        _, error = attempt(exercise.report, images, group)
    return len(calls), error, printed.getvalue().strip(), time.monotonic() - begin


def judge(seen):
    total = sum(500 + 7 * rank for rank in range(len(seen)))
    for rank, (calls, error, _, seconds) in enumerate(seen):
        if error:
            yield False, f"rank {rank}: waited {seconds:.0f} s, then {error}"
        else:
            yield calls > 0, f"rank {rank}: all_reduce was called, number of times: {calls}"
    absent = ranks(seen, lambda mine: mine[0] == 0)
    if absent:
        yield False, f"{names(absent)} did not take part: they never called all_reduce"
    else:
        printed = [mine[2] for mine in seen]
        yield f"{total:g}" in printed[0], f"rank 0 printed {printed[0]!r}; the sum is {total:g}"
        loud = ranks(printed[1:], bool)
        yield not loud, f"ranks other than 0 that printed something: {len(loud)}"
