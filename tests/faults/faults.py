"""What the tests of faults share: jobs in which something goes wrong, and what they leave behind.

A job with a fault ends within 30 s, says why in its last lines, and leaves nothing. With
FAULTS_TO=FOLDER in the environment, each fault adds its row of README.md's table there, to a file
of its area: `python scripts/update_docs.py --faults` runs all of them and makes the table.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import processes
import psutil
import pytest
from support.run import LAUNCHER, LESSONS, ROOT, load_lesson, rank_of, wait_for, works

WITHIN = 30  # seconds from the fault to the end of the job, on a quiet machine
LAST = 8  # this many lines are the last ones
# How long a rank waits for the others. A minute would make the tests slow.
IMPATIENT = {"DIST_TIMEOUT": "6"}
# The course writes a file under a name that ends in a process number, and renames it at the end.
HALF = re.compile(r"^(?!events\.).*\.\d+$")
# What PyTorch and Python themselves may leave in the folder for temporary files.
KNOWN = ("shm", "pymp-", "pytorch-errorfile-", "torchelastic_", "torchinductor_")
BIND = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /dev/shm && shift && exec "$@"', "sh"]
OWN_MEMORY = BIND if works(*BIND, "/tmp", "true") else []


class Job(processes.Job):
    """A command as a user types it, with folders of its own for all that it may leave behind."""

    known = KNOWN

    def __init__(self, *command, cwd, env=None):
        self.cwd, self.temporary = cwd, Path(tempfile.mkdtemp())
        self.shared = self.temporary / "shm"
        self.shared.mkdir()
        if OWN_MEMORY:
            command = (*OWN_MEMORY, self.shared, *command)
        own = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.temporary)}
        own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, **own, **(env or {})}
        super().__init__(command, 300, cwd=cwd, env=env, stderr=subprocess.STDOUT)
        self.struck = time.monotonic()

    def until(self, text, seconds=100):
        """Wait until the job has printed a text. The fault comes now."""
        wait_for(lambda: text in self.output or self.status is not None, seconds)
        assert text in self.output, f"no {text!r} within {seconds} s:\n{self.output}"
        self.struck = time.monotonic()

    def rank(self, number):
        """Return the process id of a rank."""
        # A lesson of Day 1 forks its ranks in their order.
        children = psutil.Process(self.process.pid).children()
        return rank_of(self, number) or sorted(rank.pid for rank in children)[number]

    def hit(self, name, rank=None):
        """Send a signal, such as KILL, to a rank, or else to the command."""
        pid = self.process.pid if rank is None else self.rank(rank)
        self.struck = time.monotonic()
        os.kill(pid, signal.Signals[f"SIG{name}"])

    def ctrl_c(self):
        """Press Ctrl-C: the terminal sends SIGINT to every process in the foreground."""
        self.struck = time.monotonic()
        os.killpg(self.process.pid, signal.SIGINT)

    def remains(self):
        """Return a list of what there is that was not there before."""
        remains = [f"process {processes.named(pid)}" for pid in self.processes()]
        remains += [f"shared memory {x}" for x in self.shared.iterdir()]
        temporary = [x for x in self.temporary.iterdir() if not x.name.startswith(self.known)]
        # torch 2.6 leaves a folder where a process ends at once.
        temporary = [x for x in temporary if not (x / "_remote_module_non_scriptable.py").exists()]
        remains += [f"temporary {x.name}" for x in temporary]
        remains += [f"half a file {x}" for x in self.cwd.rglob("*") if HALF.search(x.name)]
        return remains

    def end(self, number=signal.SIGKILL):
        """End what is still there, at once, and forget its folders."""
        super().end(number)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def check(self, fault, says, do, status=None):
        """Assert that the job ends in time, says why, and leaves nothing. Return its output.

        status   its exit status; None for any but 0. With 0 nothing is wrong: it may work on
        """
        busy = max(1, os.getloadavg()[0] / os.cpu_count())
        limit = 100 if status == 0 else WITHIN * busy
        ended = wait_for(lambda: self.status is not None, self.struck + limit - time.monotonic())
        seconds = time.monotonic() - self.struck
        wait_for(lambda: not self.remains(), 5 * busy)
        remains, end = self.remains(), self.status
        self.end()
        assert ended, f"not at an end after {limit:.0f} s:\n{self.output}"
        assert not remains, f"left behind: {remains}\n{self.output}"
        correct = end != 0 if status is None else end == status
        assert correct, f"exit status {end}:\n{self.output}"
        saw(fault, says, do, self.output, seconds if end else None)
        return self.output


def saw(fault, says, do, output, seconds=None):
    """Assert that the last lines of an output match a pattern, says; note the row of the table."""
    lines = [x for x in output.splitlines() if x and not x.startswith("salloc: J")]
    found = re.search(says or "", "\n".join(lines[-LAST:]), re.M)
    assert found, f"the last lines do not say: {says}\n{output}"
    if "FAULTS_TO" in os.environ:
        area = re.search(r"test_(\w+)\.py", os.environ["PYTEST_CURRENT_TEST"])[1]
        seen = re.sub(r"(?<!\S)/\S+/(?=\S)", "", found[0])  # without the folder of the test
        seen = f"`{seen}`" if seen else "the prompt"
        took = "" if seconds is None else f"{seconds:.0f}"
        with Path(os.environ["FAULTS_TO"], area).open("a") as table:
            table.write(f"| {fault} | {seen} | {took} | {do} |\n")


def lesson(name, *arguments, cwd, file=None, env=None):
    """Start a lesson of Day 1, or one of Day 2 as its only rank; or another file in its place."""
    file = file or ROOT / LESSONS[name]["file"]
    return Job(sys.executable, file, *arguments, cwd=cwd, env=env)


def local(nodes, *arguments, cwd, env=None):
    """Start the launcher with simulated nodes."""
    return Job(LAUNCHER, "--local", nodes, *arguments, cwd=cwd, env=env)


def on_slurm(slurm, *command, cwd):
    """Start a command on the login side of a cluster."""
    return Job(ROOT / "scripts" / "local_slurm.sh", "shell", *command, cwd=cwd, env=slurm.env)


def refused(fault, says, do, lesson_id, *arguments, env=None):
    """Assert that a lesson refuses its arguments with one sentence, before it starts anything."""
    lesson = load_lesson(lesson_id)
    with (
        mock.patch.object(sys, "argv", [lesson.__file__, *map(str, arguments)]),
        mock.patch.dict(os.environ, env or {}),
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit, match="2"),
    ):
        lesson.parse_args()
    *usage, sentence = said.getvalue().strip().splitlines()
    assert usage[0].startswith("usage: ")
    assert "error: " in sentence
    saw(fault, says, do, sentence)


def nine_images(folder, **instead):
    """Write a file of nine images for lesson 11, or with something instead; return its path."""
    path = folder / "nine.h5"
    images, labels = np.zeros((9, 28, 28), np.uint8), np.zeros(9, np.int64)
    data = {"images": images, "labels": labels, "test_images": images, "test_labels": labels}
    with h5py.File(path, "w") as file:
        for name, values in (data | instead).items():
            if values is not None:
                chunks = (3, 28, 28) if values is images else None
                file.create_dataset(name, data=values, chunks=chunks)
    return path
