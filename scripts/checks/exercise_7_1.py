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
    waited = len(gpu.times)  # steps that were done when the clock was read
    gpu.synchronize()
    if len(gpu.times) < 2:
        return measured, None, len(gpu.times), waited
    real = (gpu.times[-1][1] - gpu.times[1][0]) / (len(gpu.times) - 1)
    return measured, real, len(gpu.times), waited


def judge(seen):
    for rank, (measured, real, steps, waited) in enumerate(seen):
        yield steps >= 20, f"rank {rank}: steps taken {steps}, asked for 20"
        if not real:
            continue
        text = f"rank {rank}: measured {1000 * measured:.2f} ms, a step takes {1000 * real:.2f} ms"
        if waited < steps:
            text += f": the clock was read when {waited} of {steps} steps were done"
        elif measured > 1.5 * real:
            text += ": the first step, which takes much longer, is in it"
        yield real / 1.5 < measured < real * 1.5, text
