"""Nothing is left of a command, whatever ends it: the launcher, a time limit, Ctrl-C, kill -9."""

import re
import signal
import subprocess
import sys

import processes
import psutil
import pytest
from support.run import FAST, IMPORT, STUBBORN, is_alive, wait_for, wait_without_trouble


def test_a_launcher_that_is_stopped_ends_its_ranks(launch_ranks):
    text = """
def end(*_):
    os.write(2, f"rank {rank} is told to end\\n".encode())  # at once: two ranks write
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
os.write(1, f"ready {rank}\\n".encode())
time.sleep(600)
"""
    with launch_ranks(text) as job:
        assert wait_for(lambda: job.output.count("ready ") == 2, 60)
        job.process.terminate()
        wait_without_trouble(job)
    assert job.status == 128 + signal.SIGTERM
    assert sorted(job.errors.splitlines()) == [f"rank {rank} is told to end" for rank in (0, 1)]


@pytest.mark.parametrize("whom", ["launcher", "what starts the ranks"])
def test_after_kill_9_of_what_started_them_no_rank_is_left(whom, launch_ranks):
    with launch_ranks("os.write(1, b'ready\\n')\ntime.sleep(600)") as job:
        assert wait_for(lambda: job.output.count("ready") == 2, 60)
        launcher = psutil.Process(job.process.pid)
        (launcher if whom == "launcher" else launcher.children()[0]).kill()
        wait_without_trouble(job)
    if whom != "launcher":
        assert job.errors == "The process that starts the ranks ended with signal KILL.\n"
        assert job.status == 128 + signal.SIGKILL


def started_by(job):
    """Return the id of the process that a job has said it started."""
    return int(re.search(r"^started (\d+)$", job.output, re.M)[1])


# A command of the course that waits for another one.
WAITS = f"""{IMPORT}
from processes import Job, exit_with
def main():
    with Job([sys.executable, "-c", sys.argv[2]], 600, grace=int(sys.argv[1])) as job:
        for line in job.lines():
            print(line, end="", flush=True)
exit_with(main)
"""


@pytest.mark.parametrize(
    ("name", "status"), [("INT", 130), ("HUP", 129), ("QUIT", 131), ("TERM", 143), ("KILL", -9)]
)
def test_whatever_ends_a_command_ends_what_it_waits_for(name, status):
    stubborn = STUBBORN + "time.sleep(600)\n"
    command = [sys.executable, "-c", WAITS, 1, stubborn]
    with processes.Job(command, 60, stderr=subprocess.STDOUT, **FAST) as job:
        next(job.lines())
        job.process.send_signal(signal.Signals[f"SIG{name}"])
        job.wait()
    assert job.status == status, job.output
    assert not is_alive(started_by(job))
    if name != "KILL":  # otherwise this test has ended it: a job in a job belongs to both
        assert job.left == []
