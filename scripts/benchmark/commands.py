"""Running commands of the repository as a user does, and reading what they print."""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from course.lists import ROOT, read_course
from launcher.processes import Job

LESSONS = {x["id"]: x["file"] for x in read_course()}
DATA = ROOT / "data"
BATCH = 64  # images
LIMIT = 1200  # seconds that a command may take


class CannotMeasureError(Exception):
    """Something went wrong; the text says what, in a sentence for the user."""


class LeftOutError(Exception):
    """This machine lacks what a case needs; the text says what, in a sentence for the user."""


def start(*command, cwd, **variables):
    """Start a command of the repository in the folder cwd; return the Job."""
    words = [str(ROOT / x) if re.match(r"(day\d|scripts)/", str(x)) else str(x) for x in command]
    words[:1] = [sys.executable] if words[0] == "python" else words[:1]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", **variables}
    return Job(words, LIMIT, cwd=cwd, env=environment, stderr=subprocess.PIPE)


def finish(job):
    """Wait for the end of a command; return what it printed. Raise CannotMeasureError if it fails.

    Whatever happens, no process of the command goes on without this.
    """
    name = " ".join(Path(word).name for word in job.process.args[:2])
    with job:
        status = job.wait()
    if job.stopped:
        raise CannotMeasureError(f"{name} was stopped after {job.limit} s.")
    if status:
        last = (job.errors or job.output).strip().rpartition("\n")[2]
        raise CannotMeasureError(f"{name} failed: {last}")
    if job.left:
        left = "; ".join(job.left)
        raise CannotMeasureError(f"{name} has ended, but not all of its processes: {left}")
    return job.output


def run(*command, cwd, **variables):
    """Run a command of the repository in the folder cwd; return what it printed."""
    return finish(start(*command, cwd=cwd, **variables))


def find(pattern, output):
    """Return all that a pattern matches in an output. Raise CannotMeasureError if that is none."""
    found = re.findall(pattern, output, re.MULTILINE)
    if not found:
        raise CannotMeasureError(f"A lesson printed nothing like {pattern!r}:\n{output}")
    return found


def number(text):
    """Return the number that a lesson printed with a comma after the thousands."""
    return float(text.replace(",", ""))


def speed(output, begin="epoch"):
    """Return the images/s of the epochs that a lesson printed: the median without the first.

    The first epoch has the warm-up in it.
    """
    output = output.partition("now one process alone")[0]
    speeds = [number(x) for x in find(rf"^{begin} \d+: .* ([\d,]+) images/s$", output)]
    return statistics.median(speeds[1:] or speeds)


def changed(lesson, pattern, text, folder):
    """Write a copy of a lesson in which what a pattern matches is another text; return its path."""
    source = (ROOT / LESSONS[lesson]).read_text()
    source, count = re.subn(pattern, lambda match: text, source, flags=re.DOTALL | re.MULTILINE)
    if count != 1:
        raise CannotMeasureError(f"Lesson {lesson} has changed: there is no {pattern!r} in it.")
    path = folder / Path(LESSONS[lesson]).name
    path.write_text(source)
    return path


@contextlib.contextmanager
def one_thread():
    """Let torch compute with one thread in this process for a while, as one worker would."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def images_per_second(batches, device, seconds):
    """Return how many images/s an endless row of batches gives, after a warm-up."""
    for _ in range(10):
        next(batches)
    torch.get_device_module(device).synchronize()
    images, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += len(next(batches)[1])
    torch.get_device_module(device).synchronize()
    return images / (time.perf_counter() - begin)


def seconds_of(work, device, seconds):
    """Return the median of how long work() takes, called so often that it takes seconds in all."""
    synchronize = torch.get_device_module(device).synchronize
    work()
    synchronize()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(10):  # a clock is too coarse for one
            work()
        synchronize()
        times.append((time.perf_counter() - begin) / 10)
    return statistics.median(times)
