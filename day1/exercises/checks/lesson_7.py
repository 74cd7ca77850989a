import time
from types import SimpleNamespace

from exercises.common import Fact


def check_7_1(exercise, rank, world_size):
    """What time_step() measures on a simulated GPU, whose first step takes longer."""
    right = 20 + 10 * rank
    done = [
        0.0
    ]  # when it will have done what it was asked for, one step after the other

    def step():
        seconds = (right if len(done) > 1 else right + 400) / 1000
        done.append(max(time.perf_counter(), done[-1]) + seconds)

    def synchronize():
        time.sleep(max(0, done[-1] - time.perf_counter()))

    gpu = SimpleNamespace(step=step, synchronize=synchronize)
    measured = 1000 * exercise.time_step(gpu, 20)
    key = "early" if measured < right / 1.5 else "first"
    what = f"on this check's GPU, ms that it measures for a step of {right} ms:"
    yield Fact(what, measured, key, least=right / 1.5, most=1.5 * right)
