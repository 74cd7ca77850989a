"""Exercise 7.1: what time_step() measures, and what the steps of an imitated GPU really take."""

import time
from concurrent.futures import ThreadPoolExecutor


class TimedGpu:
    """Imitates a GPU as the exercise does, and notes when each step really began and ended."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.queue = ThreadPoolExecutor(1)
        self.last = None
        self.times = []

    def work(self, seconds):
        begin = time.perf_counter()
        time.sleep(seconds)
        self.times.append((begin, time.perf_counter()))

    def step(self):
        self.last = self.queue.submit(self.work, self.seconds + (0 if self.last else 0.4))

    def synchronize(self):
        if self.last:
            self.last.result()


def look(exercise, rank, world_size):
    gpu = TimedGpu(0.01 + 0.01 * rank)
    measured = exercise.time_step(gpu, 20)
    gpu.synchronize()
    if len(gpu.times) < 2:
        return measured, None, len(gpu.times)
    real = (gpu.times[-1][1] - gpu.times[1][0]) / (len(gpu.times) - 1)
    return measured, real, len(gpu.times)


def judge(seen):
    for rank, (measured, real, steps) in enumerate(seen):
        yield steps >= 20, f"rank {rank}: steps taken: {steps} (right: 20 or more)"
        if real:
            mine, step = 1000 * measured, 1000 * real
            text = f"rank {rank}: measured {mine:.2f} ms, a step takes {step:.2f} ms"
            limits = f"limits {step / 1.5:.2f} and {step * 1.5:.2f} ms"
            yield step / 1.5 < mine < step * 1.5, f"{text} ({limits})"
