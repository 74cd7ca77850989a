"""Why a job ended: what its processes say on stderr is passed on, the first to fail is named."""

import contextlib
import os
import re
import select
import signal

CANNOT = 69  # the exit status of a lesson that this machine or this PyTorch cannot run
STDERR = 2
SILENCE = 15  # seconds: srun may wait for a lost node without end
# What PyTorch says where ranks did not meet in time: rank 0, and the others.
APART = re.compile(r"Timed out after .* waiting for clients|client socket has timed out")
TOLD = re.compile(rb"launcher: (\d+\.\d+) (.*)\n")  # what a task tells the one who started srun


class Verdict:
    """Why a job ended: gathered from what its processes say on stderr, which is passed on.

    first    what is known of the first to fail: "rank 1 on node2 ended with exit status 3"
    lost     the node that Slurm has lost
    apart    whether the ranks did not meet in time
    cannot   whether torchrun has told of a rank that ended with status CANNOT
    """

    def __init__(self):
        self.first, self.lost, self.apart, self.cannot = "", "", False, False
        self._when = 0

    def failed(self, when, what):
        """Note that something failed, and when, in seconds. Return whether it is the first."""
        if self.first and when >= self._when:
            return False
        self.first, self._when = what, when
        return True

    def take(self, line):
        """Take a line of bytes, and pass it on unless it is a task's. Return as failed() does."""
        told = TOLD.fullmatch(line)
        if told:
            return self.failed(float(told[1]), told[2].decode(errors="replace"))
        say(line)
        text = line.decode(errors="replace").rstrip("\n")
        lost = re.match(r"srun: error:.*(?:[Ff]ailure|failed) on (?:node )?([^ :]+)", text)
        if lost:
            self.lost = lost[1]
        elif re.match(rf" *exitcode *: {CANNOT} ", text):  # torchrun itself ends with 1
            self.cannot = True
        elif APART.search(text):
            self.apart = True
        return False

    def conclude(self):
        """Say what failed first and which node is lost. Return CANNOT if nothing failed, else 0."""
        if self.cannot or self.first.endswith(f" ended with exit status {CANNOT}"):
            return CANNOT
        if self.first:  # the others fail because of it
            say(f"The first to fail: {self.first}.\n")
        if self.lost:
            say(f"Slurm has lost {self.lost}, or cannot reach it. The rest follows from that.\n")
        elif self.apart:
            say("The ranks did not meet in time. If a node was slow to read Python's files, run it")
            say(" again, or wait longer: export DIST_TIMEOUT=300. If not, see scripts/doctor.sh\n")
        return 0


def say(text):
    """Write a line to stderr at once, text or bytes."""
    data = text if isinstance(text, bytes) else text.encode()
    with contextlib.suppress(BrokenPipeError):  # nobody reads on: the ranks go on all the same
        while data:
            data = data[os.write(STDERR, data) :]


def pass_on(verdict, pipe, on_silence=None, silence=SILENCE):
    """Give a verdict all lines of a pipe, the last one even if it is cut off.

    on_silence is called once, when after a failure nothing has come for so many seconds.
    """
    limit, rest = None, b""
    while True:
        if not select.select([pipe], [], [], limit)[0]:
            limit = None
            on_silence()
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if verdict.take(line + b"\n") and on_silence:
                limit = silence
    if rest:
        verdict.take(rest + b"\n")


def ending(status):
    """Return how a command ended, in words, from its exit status as a shell or Python has it."""
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(number).name[3:]}"
    return f"signal {number}" if status < 0 else f"exit status {status}"


def as_a_shell(status):
    """Return Python's status of a command as a shell gives it: 137 instead of -9."""
    return 128 - status if status < 0 else status
