from types import SimpleNamespace

from exercises.common import Fact, SlowQueue


def check_7_1(exercise, rank, world_size):
    """What time_step() measures on a simulated GPU, whose first step takes longer."""
    queue = SlowQueue()
    right = 20 + 10 * rank

    def step():
        queue.add((right if len(queue.ends) > 1 else right + 400) / 1000)

    gpu = SimpleNamespace(step=step, synchronize=queue.wait)
    measured = 1000 * exercise.time_step(gpu, 20)
    key = "early" if measured < right / 1.5 else "first"
    what = f"on this check's GPU, ms that it measures for a step of {right} ms:"
    yield Fact(what, measured, key, least=right / 1.5, most=1.5 * right)
