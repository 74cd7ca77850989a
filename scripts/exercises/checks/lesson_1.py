"""What the check of each exercise of lesson 1 does."""

import time

import torch.distributed as dist


def check_1_1(exercise, rank, world_size, report):
    """What time_all_reduce() measures where an simulated all_reduce takes 20 ms."""
    ends = [0.0]

    class Work:  # of an simulated all_reduce, which takes 20 ms
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
    calls = len(ends) - 1
    report(calls >= 5, f"calls of all_reduce: {calls} (right: 5 or more)")
    text = f"measured {1000 * measured:.2f} ms for an all_reduce of 20 ms"
    report(0.018 < measured < 0.06, f"{text} (limits 18 and 60 ms)")
