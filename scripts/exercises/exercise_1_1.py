"""Exercise 1.1: what time_all_reduce() measures where an imitated all_reduce takes 20 ms."""

import time


def look(exercise, rank, world_size):
    import torch.distributed as dist

    original, ends = dist.all_reduce, [0.0]

    class Work:  # of an imitated all_reduce, which takes 20 ms
        def __init__(self):
            ends.append(max(time.perf_counter(), ends[-1]) + 0.02)
            self.end = ends[-1]

        def wait(self, *_):
            time.sleep(max(0, self.end - time.perf_counter()))
            return True

    def slow(tensor, *arguments, async_op=False, **options):
        work = Work()
        if async_op:
            return work
        work.wait()
        return None

    dist.all_reduce = slow
    measured = exercise.time_all_reduce(1000, 5)
    dist.all_reduce = original
    return measured, len(ends) - 1


def judge(seen):
    for rank, (measured, calls) in enumerate(seen):
        yield calls >= 5, f"rank {rank}: calls of all_reduce: {calls} (right: 5 or more)"
        yield (
            0.018 < measured < 0.06,
            f"rank {rank}: measured {1000 * measured:.2f} ms for an all_reduce of 20 ms "
            "(limits 18 and 60 ms)",
        )
