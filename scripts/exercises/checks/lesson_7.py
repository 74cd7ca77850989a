"""What the check of each exercise of lesson 7 does."""

import time
from concurrent.futures import ThreadPoolExecutor


class TimedGpu:
    """Simulates a GPU as exercise 7.1 does, and notes when each step really began and ended."""

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


def check_7_1(exercise, rank, world_size, report):
    """What time_step() measures, and what the steps of an simulated GPU really take."""
    gpu = TimedGpu(0.01 + 0.01 * rank)
    measured = 1000 * exercise.time_step(gpu, 20)
    gpu.synchronize()
    steps = len(gpu.times)
    report(steps >= 20, f"steps taken: {steps} (right: 20 or more)")
    if steps > 1:
        step = 1000 * (gpu.times[-1][1] - gpu.times[1][0]) / (steps - 1)
        text = f"measured {measured:.2f} ms, a step takes {step:.2f} ms"
        limits = f"limits {step / 1.5:.2f} and {step * 1.5:.2f} ms"
        report(step / 1.5 < measured < step * 1.5, f"{text} ({limits})")
