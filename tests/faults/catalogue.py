"""What the tests of faults share. A job in which something goes wrong ends within 30 s, says why in
its last lines, and leaves nothing.

With FAULTS_RECORD=FILE in the environment, each fault is noted there, a line of JSON, with what was
seen and how long it took: `python scripts/update_docs.py --faults` makes the table of the README of
that.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import h5py
import torch
from helpers import LAUNCHER, LESSONS, ROOT, refusal, sockets, wait_for, works

WITHIN = 30  # seconds from the fault to the end of the job
LAST = 8  # so many lines are the last ones
MARK = "FAULT_JOB"  # in the environment of every process of a job
# A rank waits so long for the others: an hour on a machine with much to do is no fault.
PATIENCE = {"DIST_TIMEOUT": "6"}
# The course first writes a file under a name that ends in the number of the process.
HALF = r"^(?!events\.).*\.\d+$"


class Job:
    """A job started as a user does, in a folder of its own, and all that it may leave behind."""

    def __init__(self, *command, cwd, env=None, typed=False, nodes=()):
        self.mark, self.cwd = uuid.uuid4().hex, cwd
        self.temporary = Path(tempfile.mkdtemp())  # a short path: sockets lie in it
        # Shared memory of its own, so that what is left there is its own: a folder that it takes
        # for /dev/shm. The nodes of a cluster have their own anyway.
        (shared := self.temporary / "shm").mkdir()
        self.shared = [Path(f"/proc/{node.read_text().strip()}/root/dev/shm") for node in nodes]
        if not self.shared and OWN_MEMORY:
            self.shared, command = [shared], (*OWN_MEMORY, shared, *command)
        self.before = self.segments() | listeners().keys()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        (home := self.temporary / "home").mkdir()
        environment |= {MARK: self.mark, "TMPDIR": str(self.temporary), "HOME": str(home)}
        environment |= env or {}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self.process = subprocess.Popen(
            [*map(str, command)],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE if typed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines, self.struck = [], time.monotonic()
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()

    def until(self, text, seconds=100):
        """Wait until the job has printed a text. The fault comes now."""
        here = wait_for(
            lambda: text in "".join(self.lines) or self.process.poll() is not None, seconds
        )
        assert here, f"no {text!r} within {seconds} s:\n{''.join(self.lines)}"
        assert text in "".join(self.lines), "".join(self.lines)
        self.struck = time.monotonic()

    def until_file(self, name):
        """Wait until the job has begun to write a file."""
        assert wait_for(lambda: list(self.cwd.glob(name)), 100)
        self.struck = time.monotonic()

    def type(self, line):
        """Type a line into a job that was started with typed=True. The fault comes now."""
        self.struck = time.monotonic()
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def processes(self):
        """Return {process id: environment} of the job's living processes, wherever they run."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended in this moment, or is somebody else's
                if self.mark.encode() in (environment := (process / "environ").read_bytes()):
                    pairs = (x.partition("=") for x in environment.decode().split("\0"))
                    found[int(process.name)] = {name: value for name, _, value in pairs}
        return found

    def rank(self, number):
        """Return the process id of a rank."""
        processes = self.processes()
        for pid, environment in processes.items():
            name = Path(f"/proc/{pid}/comm").read_text()
            if environment.get("RANK") == str(number) and name.startswith(("python", "pt_")):
                return pid
        # The lesson starts Python's fork server, and that starts the ranks in order.
        parents = {
            pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in processes
        }
        first = self.process.pid
        return sorted(p for p, parent in parents.items() if parents.get(parent) == first)[number]

    def hit(self, number, name):
        """Send a signal to a rank."""
        self.struck = time.monotonic()
        os.kill(self.rank(number), getattr(signal, f"SIG{name}"))

    def segments(self):
        """Return the names of the job's segments of shared memory and of its semaphores."""
        return {str(x) for folder in self.shared if folder.exists() for x in folder.iterdir()}

    def left(self):
        """Return a list of what there is that was not there before."""
        left = [f"process {pid} {name_of(pid)}" for pid in self.processes()]
        left += [f"shared memory {x}" for x in self.segments() - self.before]
        if new := listeners().keys() - self.before:  # other jobs come and go at the same time
            new -= used_by_others(self.mark)
            left += [f"port {port}" for x, port in listeners().items() if x in new]
        left += [f"temporary {x.name}" for x in self.temporary.iterdir() if not known(x)]
        left += [f"in the home folder {x}" for x in (self.temporary / "home").iterdir()]
        files = self.cwd.rglob("*")
        left += [f"half a file {x}" for x in files if re.search(HALF, x.name)]
        return left

    def end(self):
        """End what is still there; return the output."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not self.processes(), 5)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return "".join(self.lines)

    def check(self, fault, says, do, status=None):
        """Assert that the job ends in time, says why, and leaves nothing; return its output."""
        try:
            # On a machine that does other things too, to start and to end takes longer.
            busy = max(1, os.getloadavg()[0] / os.cpu_count())
            limit = WITHIN * busy if status != 0 else 100  # where nothing is wrong it may work on
            time_left = self.struck + limit - time.monotonic()
            ended = wait_for(lambda: self.process.poll() is not None, time_left)
            seconds = time.monotonic() - self.struck
            left, look_until = self.left(), time.monotonic() + 5 * busy
            while left and time.monotonic() < look_until:  # other jobs come and go: what stays?
                time.sleep(0.1)
                left = sorted(set(left) & set(self.left()))
        finally:
            output = self.end()
        assert ended, f"not at an end after {limit:.0f} s:\n{output}"
        assert not left, f"left behind: {left}\n{output}"
        correct = self.process.returncode == status or (status is None and self.process.returncode)
        assert correct, f"exit status {self.process.returncode}:\n{output}"
        saw(fault, says, do, output, seconds if self.process.returncode else None)
        return output


def name_of(pid):
    """Return the first words with which a process was started."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "(ended)"


def known(file):
    """Return whether a file in the folder for temporary ones is PyTorch's or Python's own."""
    names = ("home", "shm", "pymp-", "pytorch-errorfile-", "torchelastic_", "torchinductor_")
    return file.name.startswith(names)


def own_memory():
    """Return a command before a folder and a command: runs that with the folder as /dev/shm."""
    script = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh"]
    return before if works(*before, "/tmp", "true") else []


OWN_MEMORY = own_memory()


def listeners():
    """Return {inode of the socket: port} of the ports on which this user's processes listen."""
    found, user = {}, str(os.geteuid())
    for fields in sockets():
        if fields[3] == "0A" and fields[7] == user:
            found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def used_by_others(mark):
    """Return the inodes of the sockets of living processes without this mark."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                continue
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used |= set(re.findall(r"^socket:\[(\d+)", os.readlink(file)))
    return used


def saw(fault, says, do, output, seconds):
    """Assert that the last lines of an output say why; note it for the table of the README."""
    lines = [x for x in output.splitlines() if x and not x.startswith("salloc: J")]
    found = re.search(says or "", "\n".join(lines[-LAST:]), re.M)
    assert found, f"the last lines do not say: {says}\n{output}"
    if file := os.environ.get("FAULTS_RECORD"):
        test = re.split(r"[\[ ]", os.environ["PYTEST_CURRENT_TEST"])[0]
        row = {"test": test, "fault": fault, "says": found[0], "seconds": seconds, "do": do}
        with open(file, "a") as record:
            record.write(json.dumps(row) + "\n")


def lesson(name, *arguments, cwd, file=None, env=None):
    """Start a lesson of Day 1, or one of Day 2 as its only rank; or another file in its place."""
    file = file or ROOT / LESSONS[name]["file"]
    return Job(sys.executable, file, *arguments, cwd=cwd, env=env)


def local(nodes, *arguments, cwd, env=None):
    """Start the launcher with imitated nodes."""
    return Job(LAUNCHER, "--local", nodes, *arguments, cwd=cwd, env=env)


def on_slurm(slurm, *command, cwd, env=None, typed=False):
    """Start a command on the login side of a cluster."""
    login = (ROOT / "scripts" / "local_slurm.sh", "shell")
    nodes = sorted(Path(slurm.folder).glob("node*.pid"))
    return Job(
        *login, *command, cwd=cwd, env={**slurm.env, **(env or {})}, typed=typed, nodes=nodes
    )


def refused(fault, says, do, lesson_id, *arguments, env=None):
    """Assert that a lesson refuses its arguments with one sentence, before it starts anything."""
    status, output = refusal(lesson_id, *arguments, env=env)
    assert status == 2
    *usage, sentence = output.strip().splitlines()
    assert usage[0].startswith("usage: ")
    assert "error: " in sentence
    saw(fault, says, do, sentence, None)


def changed(folder, lesson_id, line, instead):
    """Write a lesson with another line in the place of one, under its own name; return the file."""
    file = ROOT / LESSONS[lesson_id]["file"]
    text = file.read_text()
    assert text.count(line) == 1
    (folder / file.name).write_text(text.replace(line, instead))
    return folder / file.name


def nine_images(folder):
    """Write a small file for lesson 11; return its path."""
    path = folder / "nine.h5"
    with h5py.File(path, "w") as file:
        images, labels = torch.zeros(9, 28, 28, dtype=torch.uint8).numpy(), torch.zeros(9).numpy()
        file.create_dataset("images", data=images, chunks=(3, 28, 28))
        file["labels"] = file["test_labels"] = labels
        file["test_images"] = images
    return path
