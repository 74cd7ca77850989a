"""Run commands, and stop all of their processes: none that they started stays behind.

If you wait for a command, you often wait for more than that: for the pipe into which it prints. A
process that the command has left behind keeps this pipe open, so the wait never ends. Here, we
wait only for the command itself and for the clock.

It needs only the standard library. All folders beside it and the tests use it.
"""

import atexit
import contextlib
import io
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn, Self

TICK = 0.1  # seconds between two looks
MARK = "COURSE_JOBS"  # the variable with the marks of all jobs that a process belongs to

running = set()  # the jobs that may have living processes


class Job:
    """A command that runs with a time limit, with all processes that it has started.

    A process of the job is known by a mark in its environment, which it hands on to all that it
    starts, so that it is also found in another process group or session, and when its parent has
    ended.

    The command has its own session, so Ctrl-C at the terminal reaches only the process that waits
    for it. Use the job in a with statement, which passes the Ctrl-C on: whatever ends the
    statement, ends the job.

    process   the Popen object of the command
    limit     how many seconds the command may take
    grace     how many seconds the processes get from the first signal to SIGKILL
    settle    how many seconds they may run on after the command, as Python's helpers do
    seconds   how many it took; None while it runs
    stopped   whether it was still running when its limit was over
    left      the processes that still ran after the end of the command or, if it was stopped,
              after SIGTERM: a list of their ids and commands. They are killed
    """

    def __init__(
        self,
        command: Iterable,
        limit: float = math.inf,
        *,
        grace: float = 15,
        settle: float = 10,
        **options,
    ):
        """Start a command. The options are those of Popen, but stdin is empty and stdout a pipe."""
        if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 100:
            sys.exit("A process may open too few files here. Allow more: ulimit -n 1024")
        self.limit, self.grace, self.settle = limit, grace, settle
        self.seconds, self.stopped, self.left = None, False, []
        self._mark, self._begin = uuid.uuid4().hex, time.monotonic()
        self._output, self._errors, self._readers = [], [], []
        environment = dict(options.pop("env", None) or os.environ)
        environment[MARK] = f"{os.environ.get(MARK, '')} {self._mark}".strip()
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        words = [str(word) for word in command]
        running.add(self)  # before it runs: a signal may come at any moment
        self.process = None
        self.process = subprocess.Popen(words, env=environment, start_new_session=True, **options)
        # Threads read the pipes, so that nobody has to wait for them. They never delay the end.
        for arguments in (self.process.stdout, self._output), (self.process.stderr, self._errors):
            if arguments[0]:
                self._readers.append(threading.Thread(target=read, args=arguments, daemon=True))
                self._readers[-1].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback):
        if self in running:
            self.end(signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM)

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    @property
    def trouble(self) -> str:
        """What went wrong, in a few words; "" if it ended with status 0 and left nothing."""
        words = []
        if self.stopped:
            words.append(f"stopped after {self.limit:g} s")
        elif self.status:
            words.append(f"exit status {self.status}")
        if self.left:
            words.append(f"processes left: {len(self.left)}")
        return ", ".join(words)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self._output)

    @property
    def errors(self) -> str:
        """What it has printed on stderr so far, if that is a separate pipe."""
        return "".join(self._errors)

    def lines(self) -> Iterator[str]:
        """Yield the lines of stdout as they come. Then the job has ended, or is stopped."""
        count = 0
        while self in running:
            time_left = self._begin + self.limit - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0, min(TICK, time_left)))
            if self.status is not None or time_left <= 0:
                self.seconds, self.stopped = time.monotonic() - self._begin, self.status is None
                if self.stopped:
                    self.left = self.end()
                else:
                    self.left = self._wait_for_none(self.settle)
                    self.end(signal.SIGKILL)
            while count < len(self._output):
                yield self._output[count]
                count += 1

    def wait(self) -> int:
        """Wait for the end of the job, or stop it at its limit. Return its exit status."""
        for _ in self.lines():
            pass
        return self.status

    def processes(self) -> list[int]:
        """Return the ids of the job's living processes."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                environment = (folder / "environ").read_bytes()  # empty if it has ended
                if self._mark.encode() in environment:
                    found.append(int(folder.name))
        return found

    def end(self, number: int = signal.SIGTERM) -> list[str]:
        """End the job: send this signal to all of its processes, and SIGKILL after its grace.

        Return those that needed the SIGKILL, a list of their ids and commands.
        """
        stubborn = []
        try:
            if send(number, self.processes()):
                stubborn = self._wait_for_none(self.grace)
        finally:  # immediately, if you do not want to wait and press Ctrl-C again
            give_up = time.monotonic() + 5  # even this takes a moment, or fails
            while send(signal.SIGKILL, self.processes()) and time.monotonic() < give_up:
                time.sleep(TICK)
        running.discard(self)
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        for reader in self._readers:
            reader.join(1)  # no longer: a process that nobody can find may hold the pipe
        return stubborn

    def _wait_for_none(self, seconds: float) -> list[str]:
        """Wait until no process of the job lives, at most so long. Return those that still do."""
        give_up = time.monotonic() + seconds
        while self.processes() and time.monotonic() < give_up:
            time.sleep(TICK)
        return [named(pid) for pid in self.processes()]


def run(command: Iterable, limit: float, **options) -> Job:
    """Run a command to its end, or stop it at its limit. Return the Job; the options are its."""
    with Job(command, limit, **options) as job:
        job.wait()
    return job


def read(pipe, lines):
    """Read a pipe to its end: add each line to a list."""
    with io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline="\n") as text:
        for line in text:
            lines.append(line)


def named(pid: int) -> str:
    """Return the id of a process, and how it was started."""
    with contextlib.suppress(OSError):  # it has ended
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        return f"{pid} {' '.join(words)}".strip()
    return str(pid)


def send(number: int, pids: list[int]) -> bool:
    """Send a signal to these processes. Return whether there are any."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return bool(pids)


def end_on_signals(*more: int) -> None:
    """Let every signal that ends this process end its jobs. What is ignored stays ignored."""

    def leave(number, frame):
        sys.exit(128 + number)

    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, *more):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's main and exit with its status, 130 after Ctrl-C. Its jobs end, too."""
    end_on_signals()
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in: command | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


@atexit.register
def end_all():
    for job in list(running):
        job.end()
