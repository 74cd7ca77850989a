"""Why a job ended: pass on what its processes say on stderr, and name the first to fail."""

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

STDERR = 2
# Exit statuses of a rank that has not failed: it cannot run here, or was told to stop, and may be
# started again.
NO_FAILURE = {os.EX_UNAVAILABLE, os.EX_TEMPFAIL}
SILENCE = 15  # seconds: srun may wait for a lost node without end
LOST = re.compile(r"srun: error:.*(?:[Ff]ailure|failed) on (?:node )?([^ :]+)")
TASK_REPORT = re.compile(r"launcher: (\d+\.\d+) (.*)")  # what a task tells the launcher


class FailureReport:
    """Why a job ended: gathered from what its processes say on stderr, which is passed on.

    failures   [(seconds, words), ...]: (1700.5, "rank 1 on node2 ended with exit status 3")
    lost       the node that Slurm has lost
    """

    def __init__(self) -> None:
        self.failures, self.lost = [], ""
        self.begin = time.time()

    def take(self, line: bytes) -> None:
        """Take a line of bytes, and pass it on unless it is a task's."""
        text = line.decode(errors="replace").rstrip("\n")
        told = TASK_REPORT.fullmatch(text)
        if told:
            self.failures.append((float(told[1]), told[2]))
            return
        write_stderr(line)
        lost = LOST.match(text)
        if lost:
            self.lost = lost[1]

    def report_cause(self) -> int:
        """Say what failed first, and which node is lost. Return 0, or one of NO_FAILURE.

        Between nodes, first is as right as their clocks.
        """
        first = min(self.failures)[1] if self.failures else ""  # the others fail because of it
        for status in NO_FAILURE:
            if first.endswith(f" ended with {ending(status)}"):
                return status
        if first:
            write_stderr(f"The first to fail: {first}.\n")
            self.point_to_logs()
        if self.lost:
            words = "or cannot reach it. The rest follows from that."
            write_stderr(f"Slurm has lost {self.lost}, {words}\n")
        return 0

    def point_to_logs(self) -> None:
        """With --max-restarts, torchrun has put what the ranks said into files: say which."""
        logs = [x for x in Path("runs/torchrun").rglob("stderr.log") if x.stat().st_size]
        logs = sorted(logs, key=lambda log: log.stat().st_mtime)
        if logs and logs[-1].stat().st_mtime >= self.begin:
            write_stderr(f"What the ranks said is in runs/torchrun, the last of it: {logs[-1]}\n")


def write_stderr(text: str | bytes) -> None:
    """Write to stderr immediately, text or bytes."""
    data = text if isinstance(text, bytes) else text.encode()
    with contextlib.suppress(BrokenPipeError):  # nobody reads on, but the ranks continue
        while data:
            data = data[os.write(STDERR, data) :]


def forward(report: FailureReport, pipe: int, on_silence: Callable[[], None] | None = None) -> None:
    """Give a report all lines of a pipe, the last one even if it is cut off.

    on_silence is called once, if after a failure nothing arrives for SILENCE seconds.
    """
    data, rest = b"more", b""
    while data:
        limit = SILENCE if on_silence and report.failures else None
        if not select.select([pipe], [], [], limit)[0]:
            on_silence()
            on_silence = None
            continue
        data = os.read(pipe, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            report.take(line + b"\n")
    if rest:
        report.take(rest + b"\n")


def ending(status: int) -> str:
    """Return how a command ended, in words, from its exit status as a shell or Python has it."""
    with contextlib.suppress(ValueError):  # there is no such signal
        return f"signal {signal.Signals(as_a_shell(status) - 128).name[3:]}"
    return f"exit status {status}"


def as_a_shell(status: int) -> int:
    """Return Python's status of a command as a shell gives it: 137 instead of -9."""
    return 128 - status if status < 0 else status
