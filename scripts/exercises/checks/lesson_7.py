from types import SimpleNamespace

from exercises.common import SlowQueue


def check_7_1(exercise, rank, world_size, report):
    """What time_step() measures on a simulated GPU, whose first step takes longer."""
    queue = SlowQueue()
    seconds = 0.02 + 0.01 * rank

    def step():
        queue.add(seconds if len(queue.ends) > 1 else seconds + 0.4)

    gpu = SimpleNamespace(step=step, synchronize=queue.wait)
    measured = exercise.time_step(gpu, 20)
    text = f"on this check's GPU a step takes {1000 * seconds:g} ms, measured {1000 * measured:.2f}"
    limits = f"limits {1000 * seconds / 1.5:.2f} and {1500 * seconds:.2f} ms"
    report(seconds / 1.5 < measured < seconds * 1.5, f"{text} ({limits})")
