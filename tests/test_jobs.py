"""scripts/lib/processes.py: a job is ended wholly, and nobody waits longer than its limit."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, need, wait_for
from launcher import processes

# Starts a process that ignores SIGTERM and keeps stdout open; then goes on with what follows.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a program started now ignores it, too
sleep = subprocess.Popen(["sleep", "600"], {options})
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print(sleep.pid, flush=True)
"""
PLACES = {
    "in its process group": "",
    "in another process group": "process_group=0",
    "in another session": "start_new_session=True",
    "with another environment": "env={}",
}


def python(text):
    return [sys.executable, "-c", text]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 1)
    monkeypatch.setattr(processes, "SETTLE", 1)
    monkeypatch.setattr(processes, "PATIENCE", 1)


def lives(pid):
    need("ps")
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout[:1] not in ("", "Z")  # a zombie has ended


def test_a_command_that_ends_well():
    text = "import sys; print('one\\ntwo', end=''); print('three', file=sys.stderr)"
    job = processes.run(python(text), 60, stderr=subprocess.PIPE)
    assert (job.output, job.errors, job.status, job.trouble) == ("one\ntwo", "three\n", 0, "")
    assert 0 < job.seconds < 60
    assert not job.stopped
    assert job.left == []


def test_what_went_wrong_is_said():
    assert processes.run(["sh", "-c", "exit 3"], 60).trouble == "exit status 3"
    assert processes.run(["sleep", "60"], 0.2).trouble == "stopped after 0.2 s"
    job = processes.run(["sh", "-c", "sleep 60 & exit 3"], 60)
    assert job.trouble == "exit status 3, processes left: 1"


def test_lines_come_while_the_command_runs():
    with processes.Job(["sh", "-c", r"printf 'one\ntw\377o\n'; sleep 60"], 60) as job:
        lines = job.lines()
        assert next(lines) == "one\n"
        assert next(lines) == "tw\N{REPLACEMENT CHARACTER}o\n"
        assert job.status is None
    assert job.status == -signal.SIGTERM


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_is_left_is_ended(place):
    job = processes.run(python(STUBBORN.format(options=PLACES[place])), 60)
    assert job.trouble == "processes left: 1"
    assert job.left == [f"{job.output.strip()} sleep 600"]
    assert not lives(int(job.output))


@pytest.mark.parametrize("place", PLACES)
def test_at_the_limit_all_is_ended(place):
    text = STUBBORN.format(options=PLACES[place]) + "time.sleep(600)\n"
    begin = time.monotonic()
    job = processes.run(python(text), 5)
    assert job.trouble == "stopped after 5 s, processes left: 1"
    assert not lives(int(job.output))
    assert time.monotonic() - begin < 60


def test_nobody_waits_for_a_pipe_that_cannot_be_closed():
    """A process without the mark, in another session, is not found. The rest goes on."""
    text = STUBBORN.format(options="start_new_session=True, env={}")
    begin = time.monotonic()
    job = processes.run(python(text), 60)
    pid = int(job.output)
    try:
        assert lives(pid)
        assert job.trouble == ""
        assert time.monotonic() - begin < 50
    finally:
        os.kill(pid, signal.SIGKILL)


def test_without_proc_the_session_counts(monkeypatch, tmp_path):
    need("ps")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    group, session = PLACES["in another process group"], PLACES["in another session"]
    job = processes.run(python(STUBBORN.format(options=group)), 60)
    assert job.trouble == "processes left: 1"
    assert not lives(int(job.output))
    job = processes.run(python(STUBBORN.format(options=session)), 60)
    assert job.trouble == ""
    os.kill(int(job.output), signal.SIGKILL)


def test_a_job_in_a_job_belongs_to_both():
    inner = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
    inner += "from lib import processes\n"
    inner += "job = processes.Job(['sleep', '600'], 600)\n"
    inner += "print(job.process.pid, *job.processes(), flush=True)\n"
    inner += "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"  # it cannot end its job
    job = processes.run(python(inner), 60)
    pid, alone = map(int, job.output.split())
    assert pid == alone
    assert job.trouble == "exit status -9, processes left: 1"
    assert not lives(pid)


def press_ctrl_c():
    raise KeyboardInterrupt


def test_ctrl_c_is_passed_on():
    text = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(3))\n"
    text += "print('ready', flush=True); time.sleep(600)"
    job = processes.Job(python(text), 60)
    next(job.lines())
    with pytest.raises(KeyboardInterrupt), job:
        press_ctrl_c()
    assert job.trouble == "exit status 3"


# Waits for a job that started a stubborn process.
WAITS = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from launcher import processes
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
processes.GRACE, processes.PATIENCE = float(sys.argv[1]), 1
processes.end_on_signals()
with processes.Job([sys.executable, "-c", sys.argv[2]], 600) as job:
    for line in job.lines():
        print(line, end="", flush=True)
"""


@pytest.mark.parametrize("name", ["INT", "HUP", "QUIT", "TERM"])
def test_whatever_ends_the_one_who_waits_ends_the_job(name):
    number = signal.Signals[f"SIG{name}"]
    stubborn = STUBBORN.format(options="start_new_session=True") + "time.sleep(600)\n"
    with processes.Job([*python(WAITS), 1, stubborn], 60, stderr=subprocess.STDOUT) as job:
        pid = int(next(job.lines()))
        job.process.send_signal(number)
        job.wait()
    # Python ends by the signal itself after a Ctrl-C that nobody has handled.
    assert job.trouble == f"exit status {-number if name == 'INT' else 128 + number}"
    assert not lives(pid)


def test_ctrl_c_again_does_not_wait():
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    deaf += "print('ready', flush=True); time.sleep(600)"
    with processes.Job([*python(WAITS), 600, deaf], 60, stderr=subprocess.STDOUT) as job:
        next(job.lines())
        job.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert job.status is None
        job.process.send_signal(signal.SIGINT)
        job.wait()
    assert job.trouble == f"exit status {-signal.SIGINT}"


def test_what_is_ignored_stays_ignored():
    script = 'trap "" HUP INT; exec "$@"'
    slow = "import time; print('ready', flush=True); time.sleep(2); print('done')"
    waits = re.sub("signal.signal.*\n", "", WAITS)
    command = ["sh", "-c", script, "sh", *python(waits), 1, slow]
    with processes.Job(command, 60, stderr=subprocess.STDOUT) as job:
        next(job.lines())
        for number in (signal.SIGHUP, signal.SIGINT):
            job.process.send_signal(number)
        job.wait()
    assert job.trouble == ""
    assert job.output == "ready\ndone\n"


def test_a_job_without_a_with_statement_ends_with_its_process():
    text = WAITS.partition("with ")[0] + "print(processes.Job(['sleep', '600'], 600).process.pid)"
    job = processes.run([*python(text), 1], 60)
    assert job.trouble == ""
    assert wait_for(lambda: not lives(int(job.output)), 5)
