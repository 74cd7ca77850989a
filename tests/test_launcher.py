"""The launcher without Slurm: it starts ranks, names the first to fail, and leaves nothing behind.

What Slurm would tell it stands in dictionaries here; tests/test_slurm.py has a real one.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import LAUNCHER, ROOT, cannot, launch, load, need, wait_for, works
from launcher import errors, gpus, meeting_point, processes, srun_options, start_rank, task
from launcher.launch import parse_args

# What the ranks of the tests begin with. after() waits until others have done what they should.
BEGIN = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def after(*names):
    while not all(pathlib.Path(name).exists() for name in names):
        time.sleep(0.05)
def done(name):
    pathlib.Path(name).touch()
"""
# A child that ignores SIGTERM and keeps stdout open. Its parent goes on with what follows.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a program started now ignores it, too
child = subprocess.Popen(["sleep", "600"], {options})
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.write(1, f"started {{child.pid}}\\n".encode())
"""
PLACES = {
    "in its process group": "",
    "in another process group": "process_group=0",
    "in another session": "start_new_session=True",
    "with another environment": "env={}",
}
FAST = {"grace": 1, "settle": 1, "patience": 1}  # seconds, and no more on a busy machine


@pytest.fixture
def start(tmp_path):
    """A function that starts the launcher with ranks that run a text; it returns the Job."""

    def job(text, nodes="2", *options, limit=100, before=()):
        (tmp_path / "rank.py").write_text(BEGIN + text)
        command = [*before, LAUNCHER, "--local", nodes, *options]
        command += [tmp_path / "rank.py", "a b", "--", "-x"]
        # With the time that the launcher itself needs to end its ranks.
        return processes.Job(command, limit, cwd=tmp_path, stderr=subprocess.PIPE)

    return job


def wait_without_trouble(job):
    job.wait()
    assert not job.stopped, job.output + job.errors
    assert job.left == []


def started(job):
    """Return the ids of the processes that a job has said it started."""
    return [int(pid) for pid in re.findall(r"^started (\d+)$", job.output, re.M)]


def lives(pid):
    need("ps")
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout[:1] not in ("", "Z")  # a zombie has ended


# Ranks on imitated nodes.


def test_each_rank_gets_its_variables_and_all_arguments(start, monkeypatch):
    for name in ("MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    text = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # Slurm's warning comes too early
row = [*(os.environ[name] for name in names), ignored, sys.argv[1:]]
os.write(1, (" ".join(map(str, row)) + "\\n").encode())
"""
    with start(text, "2x3") as job:
        wait_without_trouble(job)
    assert (job.status, job.errors) == (0, "")
    port = re.search(r"^meeting point: 127\.0\.0\.1:(\d+), interface lo", job.output, re.M)[1]
    rows = sorted(job.output.splitlines()[3:])
    expected = [f"{r} {r % 3} 6 3 127.0.0.1 {port} True ['a b', '--', '-x']" for r in range(6)]
    assert rows == expected


def test_what_the_user_has_set_stays(tmp_path):
    env = {"MASTER_PORT": "1234", "OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"}
    status, output = launch("--local", "2", "--dry-run", "9", cwd=tmp_path, env=env)
    assert status == 0
    assert "meeting point: 127.0.0.1:1234, interface eth9\neach rank: 7 threads of " in output


@pytest.mark.parametrize(
    "name", ["9", "9_torch_dist_multi_node.py", "day2/9_torch_dist_multi_node"]
)
def test_a_lesson_is_found_by_number_name_or_path(name, tmp_path):
    path = ROOT / f"{name}.py" if name.startswith("day2/") else name
    status, output = launch("--local", "2", "--dry-run", path, "a b", cwd=tmp_path)
    assert status == 0
    assert output.splitlines()[-1].endswith("day2/9_torch_dist_multi_node.py 'a b'")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Which lesson?"),
        (("--local", "2x", "9"), "--local: wants N or NxM"),
        (("--local", "0", "9"), "--local: wants N or NxM"),
        (("--max-restarts", "often", "9"), "--max-restarts: invalid int value"),
        (("--locale", "9"), "There is no option --locale"),
        (("--local", "1", "nothing.py"), "There is no lesson and no file 'nothing.py'"),
    ],
)
def test_bad_input_gets_one_message(arguments, sentence, tmp_path):
    status, output = launch(*arguments, cwd=tmp_path)
    assert status == 1
    assert len(output.splitlines()) == 1
    assert output.startswith(sentence)


def test_outside_a_job_one_is_asked_for_and_in_a_step_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    status, output = launch("9", cwd=tmp_path)
    assert (status, "salloc --nodes 2" in output) == (1, True)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    status, output = launch("9", cwd=tmp_path, env=step)
    assert status == 1
    assert output.startswith("srun has started this, which calls srun itself. Start it without")


def test_a_node_without_python_says_so(tmp_path):
    """Its .venv lies on a disk that this node does not see, or no module is loaded."""
    for name in ("bash", "dirname", "hostname", "head"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    if (ROOT / ".venv").exists():
        cannot("the course has an environment of its own")
    env = {"PATH": str(tmp_path), "PYTHON": "python-of-a-module"}
    done = subprocess.run([LAUNCHER, "9"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("No Python with torch on ")


@pytest.mark.parametrize("tool", ["", "nvidia-smi", "rocm-smi"])
def test_monitor_notes_how_busy_each_node_is(tool, start, tmp_path, monkeypatch):
    need("vmstat")
    if tool:  # there are no GPUs here: something in the place of their makers' tools
        seconds = 0 if tool == "rocm-smi" else 60  # the others go on until they are ended
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$@"\nexec sleep {seconds}\n')
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with start("time.sleep(2.5)", "2x2", "--monitor") as job:
        wait_without_trouble(job)
    cpu, gpu = (sorted(tmp_path.glob(f"logs/{kind}-*.out")) for kind in ("cpu", "gpu"))
    assert [file.name[-20:] for file in cpu] == ["-imitated-node-0.out", "-imitated-node-1.out"]
    assert all(" us sy id " in file.read_text() for file in cpu)
    assert len(gpu) == (2 if tool else 0)
    expected = {"nvidia-smi": "utilization.gpu", "rocm-smi": "--showuse"}
    assert all(expected[tool] in file.read_text() for file in gpu)


# Python in a container, as day2/SITES.md shows it. Instead of Apptainer, this starts none.
APPTAINER = f"""#!/bin/sh
test "$1 $2 $3 $4 $5 $6" = "exec --nv --bind COURSE IMAGE python3" || exit 1
shift 6
IN_CONTAINER=yes exec {shlex.quote(sys.executable)} "$@"
"""


def test_python_may_be_a_script_that_starts_a_container(start, tmp_path, monkeypatch):
    page = (ROOT / "day2" / "SITES.md").read_text()
    text = re.search(r"^```sh\n(#!/bin/sh\nexec apptainer .*?)^```$", page, re.M | re.S)[1]
    folder = tmp_path / "in a container"
    folder.mkdir()
    text = text.replace("<folder of the course>", "COURSE").replace("<image>.sif", "IMAGE")
    for name, content in {"python.sh": text, "apptainer": APPTAINER}.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PYTHON", f"{folder}/python.sh")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with start("os.write(1, f'{os.environ[\"IN_CONTAINER\"]} {sys.argv[1:]}\\n'.encode())") as job:
        wait_without_trouble(job)
    assert f"threads of {folder}/python.sh, on " in job.output
    assert job.output.count("yes ['a b', '--', '-x']\n") == 2


@pytest.mark.full
def test_torchrun_starts_the_ranks_again_when_one_fails(start):
    text = """
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"{rank} of {os.environ['WORLD_SIZE']}, restart {count}\\n".encode())
if count == 0:
    sys.exit(1) if rank == 3 else time.sleep(600)
"""
    with start(text, "2x2", "--max-restarts", "1") as job:
        wait_without_trouble(job)
    assert job.status == 0, job.output + job.errors
    assert all(f"{rank} of 4, restart 1\n" in job.output for rank in range(4))


@pytest.mark.parametrize(
    ("words", "torchrun", "restarts"),
    [
        ([], False, None),
        (["--torchrun"], True, "0"),
        (["--max-restarts", "0"], True, "0"),
        (["--max-restarts", "3"], True, "3"),
    ],
)
def test_torchrun_is_told_what_srun_would_be(words, torchrun, restarts, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    options = parse_args(["--local", "2x3", *words, "file.py", "--", "--torchrun"])
    variables = {"RANK": "1", "WORLD_SIZE": "2", "RANKS_PER_NODE": "3"}
    variables |= {"MASTER_ADDR": "node1", "MASTER_PORT": "20001"}
    command, environment = start_rank.command_of(options, variables, "10.0.0.2")
    assert command[-3:] == ["file.py", "--", "--torchrun"]
    assert ("torch.distributed.run" in command) == torchrun
    assert ("RANK" in environment) == (not torchrun)
    if torchrun:
        assert "TORCH_ELASTIC_WORKER_IDENTICAL" not in environment
        given = dict(itertools.pairwise(command))
        assert given["--max-restarts"] == restarts
        assert (given["--nnodes"], given["--nproc-per-node"]) == ("2", "3")
        assert given["--rdzv-endpoint"] == "node1:20001"
        assert given["--rdzv-conf"] == "is_host=0"
        assert given["--local-addr"] == "10.0.0.2"


# The first to fail.


def test_the_first_to_fail_is_named_though_others_fail_later(start):
    """And it is the first in time, not in number; its exit status is the launcher's."""
    text = """
if rank == 2:
    after("ready0", "ready1")
    sys.exit(5)
done(f"ready{rank}")
after("ready0", "ready1")
time.sleep(0.5)
print(f"rank {rank} fails because of it", file=sys.stderr)
sys.exit(3)
"""
    with start(text, "3") as job:
        wait_without_trouble(job)
    *others, last = job.errors.splitlines()
    assert sorted(others) == [f"rank {rank} fails because of it" for rank in (0, 1)]
    assert last == "The first to fail: rank 2 on imitated node 2 ended with exit status 5."
    assert job.status == 5


def test_after_kill_9_of_a_rank_the_others_end_with_all_that_they_started(start):
    """Though they ignore SIGTERM. What they say in the meantime is passed on."""
    text = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for place in ({}, {"process_group": 0}, {"start_new_session": True}):
        subprocess.Popen(["sleep", "600"], **place)
    done("ready")
    time.sleep(600)
after("ready")
sys.stderr.write("the last words")
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with start(text, "1x2") as job:
        wait_without_trouble(job)
    assert job.status == 128 + signal.SIGKILL
    assert job.errors == (
        "Still running: rank 0 on imitated node 0.\n"
        "the last words\n"
        "The first to fail: rank 1 on imitated node 0 ended with signal KILL.\n"
    )


def test_what_a_rank_leaves_behind_is_ended_and_named(start):
    with start("rank or subprocess.Popen(['sleep', '600'], start_new_session=True)") as job:
        wait_without_trouble(job)
    assert job.status == 0
    said = r"Left behind by a rank, ended now: process \d+ sleep 600\n"
    assert re.fullmatch(said, job.errors), job.errors


def test_status_69_is_handed_on_and_nobody_is_named(start):
    text = """
if rank == 1:
    sys.exit(print("This machine has no wheels.", file=sys.stderr) or 69)
time.sleep(600)
"""
    with start(text) as job:
        wait_without_trouble(job)
    assert (job.status, job.errors) == (69, "This machine has no wheels.\n")


@pytest.mark.parametrize(
    ("status", "words", "as_a_shell"),
    [
        (3, "exit status 3", 3),
        (-signal.SIGKILL, "signal KILL", 137),
        (128 + signal.SIGTERM, "signal TERM", 143),  # of a shell around it
        (200, "exit status 200", 200),  # there are not so many signals
        (255, "exit status 255", 255),
    ],
)
def test_an_end_in_words_and_as_a_shell_gives_it(status, words, as_a_shell):
    assert errors.ending(status) == words
    assert errors.as_a_shell(status) == as_a_shell


FAILED = "launcher: 1700000002.500000 rank 0 on node1 ended with exit status 1"
BEFORE = "launcher: 1700000002.250000 rank 5 on node2 ended with signal KILL"
FIRST = "The first to fail: rank {} on node{} ended with {}.\n"
LOST = "Slurm has lost node2, or cannot reach it. The rest follows from that.\n"


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        ([], 0, ""),
        ([FAILED, BEFORE], 0, FIRST.format(5, 2, "signal KILL")),
        (["srun: error: Node failure on node2"], 0, LOST),
        (["srun: error: Task launch for StepId=7.0 failed on node node2: Bad"], 0, LOST),
        ([FAILED.replace("status 1", "status 69")], 69, ""),
        (["  exitcode  : 69 (pid: 71)"], 69, ""),  # torchrun itself ends with 1
        (["launcher: what a user says"], 0, ""),
        # Ranks that did not meet: rank 0, and another one.
        (
            ["DistStoreError: Timed out after 61 seconds waiting for clients. 1/2"],
            0,
            "DIST_TIMEOUT",
        ),
        (["The client socket has timed out after 60000ms"], 0, "DIST_TIMEOUT"),
    ],
)
def test_what_is_said_on_stderr_tells_why_a_job_ended(lines, status, said, capfd):
    verdict = errors.Verdict()
    for line in lines:
        verdict.take(f"{line}\n".encode())
    passed_on = "".join(f"{line}\n" for line in lines if line not in (FAILED, BEFORE))
    assert verdict.conclude() == status
    text = capfd.readouterr().err
    if "status 69" not in passed_on:
        assert text.startswith(passed_on)
        text = text.removeprefix(passed_on)
    assert text == said or (said == "DIST_TIMEOUT" and "export DIST_TIMEOUT=300" in text)


# Nothing is left.


@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_a_launcher_that_is_stopped_ends_its_ranks(name, status, start):
    text = """
def end(*_):
    os.write(2, f"rank {rank} is told to end\\n".encode())  # at once: two ranks write
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
os.write(1, f"ready {rank}\\n".encode())
time.sleep(600)
"""
    with start(text) as job:
        assert wait_for(lambda: job.output.count("ready ") == 2, 60)
        job.process.send_signal(signal.Signals[f"SIG{name}"])
        wait_without_trouble(job)
    assert job.status == status
    assert sorted(job.errors.splitlines()) == [f"rank {rank} is told to end" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("launched", "place"),
    [*((False, place) for place in PLACES), (True, "in another session")],
    ids=[*PLACES, "--local"],
)
def test_at_a_time_limit_all_is_ended(launched, place, start):
    text = STUBBORN.format(options=PLACES[place]) + "time.sleep(600)\n"
    if launched:
        job = start(text, "1", limit=8)
    else:
        job = processes.Job([sys.executable, "-c", text], 5, **FAST)
    with job:
        job.wait()
    by_others = "" if launched else ", processes left: 1"  # the launcher ends all itself
    assert job.trouble == f"stopped after {job.limit} s{by_others}"
    assert not lives(*started(job))


@pytest.mark.parametrize("place", PLACES)
def test_what_a_command_leaves_behind_is_ended(place):
    text = STUBBORN.format(options=PLACES[place])
    job = processes.run([sys.executable, "-c", text], 60, **FAST)
    (pid,) = started(job)
    assert job.trouble == "processes left: 1"
    assert job.left == [f"{pid} sleep 600"]
    assert not lives(pid)


def test_nobody_waits_for_a_pipe_that_cannot_be_closed(start):
    """A process without the mark, in another session, is not found. The launcher ends anyway."""
    with start(STUBBORN.format(options="start_new_session=True, env={}"), "1") as job:
        job.wait()
    (pid,) = started(job)
    assert lives(pid)
    os.kill(pid, signal.SIGKILL)
    assert job.trouble == ""


def test_without_proc_the_session_counts(monkeypatch, tmp_path):
    """As on a Mac."""
    need("ps")
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    text = STUBBORN.format(options=PLACES["in another process group"])
    job = processes.run([sys.executable, "-c", text], 60, **FAST)
    assert job.trouble == "processes left: 1"
    assert not lives(*started(job))


def test_a_job_gives_its_lines_while_it_runs():
    command = ["sh", "-c", r"printf 'one\ntw\377o\r'; echo bad >&2; sleep 0.1; echo end; sleep 60"]
    with processes.Job(command, 60, stderr=subprocess.PIPE) as job:
        lines = job.lines()
        assert next(lines) == "one\n"
        assert next(lines) == "tw\N{REPLACEMENT CHARACTER}o\rend\n"
        assert job.status is None
        assert wait_for(lambda: job.errors == "bad\n", 10)
    assert job.status == -signal.SIGTERM


def test_a_job_says_what_went_wrong():
    job = processes.run(["sh", "-c", "printf all; exit 3"], 60)
    assert (job.trouble, job.status, job.output) == ("exit status 3", 3, "all")
    assert 0 < job.seconds < 60
    job = processes.run(["sh", "-c", "sleep 60 & exit 3"], 60, **FAST)
    assert job.trouble == "exit status 3, processes left: 1"


# A command of the course that waits for another one.
WAITS = f"""
import signal, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from launcher.processes import Job, exit_with
def main():
    with Job([sys.executable, "-c", sys.argv[2]], 600, grace=int(sys.argv[1]), patience=1) as job:
        for line in job.lines():
            print(line, end="", flush=True)
exit_with(main)
"""


@pytest.mark.parametrize(
    ("name", "status"), [("INT", 130), ("HUP", 129), ("QUIT", 131), ("TERM", 143), ("KILL", -9)]
)
def test_whatever_ends_a_command_ends_what_it_waits_for(name, status):
    stubborn = STUBBORN.format(options=PLACES["in another session"]) + "time.sleep(600)\n"
    command = [sys.executable, "-c", WAITS, 1, stubborn]
    with processes.Job(command, 60, stderr=subprocess.STDOUT, **FAST) as job:
        next(job.lines())
        job.process.send_signal(signal.Signals[f"SIG{name}"])
        job.wait()
    assert job.status == status, job.output
    assert not lives(*started(job))
    if name != "KILL":  # otherwise this test has ended it: a job in a job belongs to both
        assert job.left == []


def test_ctrl_c_again_does_not_wait():
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    deaf += "print('ready', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", WAITS, 600, deaf]
    with processes.Job(command, 60, stderr=subprocess.STDOUT, **FAST) as job:
        next(job.lines())
        job.process.send_signal(signal.SIGINT)
        assert not wait_for(lambda: job.status is not None, 1)
        job.process.send_signal(signal.SIGINT)
        wait_without_trouble(job)
    assert job.status == 130


def test_what_is_ignored_stays_ignored():
    """As under nohup, and in the background of a script."""
    slow = "import time; print('ready', flush=True); time.sleep(2); print('done')"
    command = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh", sys.executable, "-c", WAITS, 1, slow]
    with processes.Job(command, 60, stderr=subprocess.STDOUT) as job:
        next(job.lines())
        for number in (signal.SIGHUP, signal.SIGINT):
            job.process.send_signal(number)
        job.wait()
    assert (job.trouble, job.output) == ("", "ready\ndone\n")


# What is made of Slurm's variables.


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,128(x3)", [1, 128, 128, 128]), ("3 2", [3, 2])],
)
def test_a_list_of_slurm_is_read(text, numbers):
    assert srun_options.expand(text) == numbers


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1"}, 4),
        ({"SLURM_STEP_GPUS": "0,1", "SLURM_JOB_GPUS": "0,1,2"}, 2),  # as at Jülich
        ({"SLURM_JOB_GPUS": "3"}, 1),
    ],
)
def test_gpus_are_counted_where_slurm_only_lists_them(given, count):
    assert srun_options.count_gpus(given) == count


SHELL_OF_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
SHELL_OF_SALLOC = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}
PER_NODE, TASKS, SHARES = "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE"


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, [2, 1]),  # nobody asked for tasks: as many as GPUs
        ({SHARES: "128(x2)"}, [2, 1]),  # about CPUs
        ({PER_NODE: "4"}, [4, 4]),
        ({PER_NODE: "4", TASKS: "8"}, [4, 4]),
        ({TASKS: "5", SHARES: "3,2"}, [3, 2]),
        ({PER_NODE: "4", TASKS: "5", SHARES: "3,2"}, [3, 2]),
        ({TASKS: "2", SHARES: "1(x2)"}, [1, 1]),
        ({TASKS: "2", SHARES: "1(x2)", **SHELL_OF_SALLOC}, [1, 1]),
        ({TASKS: "2", SHARES: "1(x2)", **SHELL_OF_SRUN}, [2, 1]),  # the tasks are the shells
    ],
)
def test_as_many_ranks_as_tasks_were_asked_for_else_as_gpus(given, ranks):
    assert srun_options.choose_ranks([2, 1], given) == ranks


@pytest.mark.parametrize(
    ("given", "ranks", "cpus", "options"),
    [
        ("8(x2)", [2, 2], 4, "--ntasks=4 --nodes=2 --ntasks-per-node=2 --distribution=block"),
        ("8(x2) wanted 2", [2, 2], 2, "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=2"),
        ("8(x2)", [2, 1], 4, "--nodelist=node1,node1,node2 --distribution=arbitrary"),
        ("8,4", [2, 2], 2, "--nodelist=node1,node1,node2,node2 --distribution=arbitrary"),
        ("2(x2)", [4, 4], 0, "--cpus-per-task=1 --overcommit"),
        ("8(x2) torchrun", [2, 1], 4, "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=8"),
        ("8(x2) shell", [2, 2], 4, "--overlap --export=ALL --kill-on-bad-exit=1 --input=none"),
    ],
)
def test_srun_is_told_where_each_rank_goes(given, ranks, cpus, options):
    cpus_on, *more = given.split()
    variables = {"SLURM_JOB_CPUS_PER_NODE": cpus_on}
    variables |= SHELL_OF_SRUN if "shell" in more else SHELL_OF_SALLOC
    variables |= {"SLURM_CPUS_PER_TASK": "2"} if "wanted" in more else {}
    arguments = (["node1", "node2"], ranks, "torchrun" in more, variables)
    found, words = srun_options.options_of(*arguments)
    assert found == cpus
    assert set(options.split()) <= set(words)
    for word in ("--overcommit", "--overlap"):
        assert (word in words) == (word in options)


@pytest.mark.parametrize(
    "given", [{"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1"}]
)
def test_torchrun_wants_all_gpus_of_a_node(given):
    given = {"SLURM_JOB_CPUS_PER_NODE": "8(x2)", **given}
    with pytest.raises(SystemExit, match="With --torchrun a node has one task, and --gpus-per-ta"):
        srun_options.options_of(["node1", "node2"], [2, 2], True, given)
    srun_options.options_of(["node1", "node2"], [1, 1], True, given)  # all have one anyway


# What Slurm and the launcher tell the last of three tasks, which is alone on its node.
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
TASK |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
TASK |= {"SLURM_NODEID": "1", "SLURM_CPUS_ON_NODE": "1", "SLURMD_NODENAME": "node2"}
TASK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANKS_PER_NODE": "2 1"}


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_five_variables_are_those_of_the_task(torchrun):
    given = {**TASK, "SLURM_GPUS_ON_NODE": "4"}
    found = task.variables_of_rank(given, torchrun)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANKS_PER_NODE"]
    assert [found[name] for name in names] == ["2", "0", "3", "1", "1"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "1")
    assert found.get("GPUS_ON_NODE") == (None if torchrun else "4")


@pytest.mark.parametrize(
    ("cpus", "ranks", "machine", "expected"),
    [(8, 2, 8, "4"), (2, 2, 8, "2"), (8, 16, 8, "1"), (0, 1, 8, "1")],
)
def test_threads_are_shared(cpus, ranks, machine, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert start_rank.threads(cpus, ranks) == expected


@pytest.mark.parametrize(
    ("handler", "status", "said"),
    [
        ("lambda *_: sys.exit(print('saved'))", 0, "saved\n"),
        ("lambda *_: sys.exit(3)", 3, ""),
        ("signal.SIG_DFL", 128 + signal.SIGTERM, ""),
    ],
)
def test_sigterm_for_a_task_reaches_its_rank_and_nobody_has_failed(handler, status, said, tmp_path):
    """With control groups Slurm signals only what it has started itself."""
    text = f"signal.signal(signal.SIGTERM, {handler})\nprint('ready')\ntime.sleep(60)\n"
    (tmp_path / "rank.py").write_text(BEGIN + text)
    command = [LAUNCHER, "--as-task", tmp_path / "rank.py"]
    options = {"cwd": tmp_path, "env": os.environ | TASK, "stderr": subprocess.PIPE, **FAST}
    with processes.Job(command, 60, **options) as job:
        assert wait_for(lambda: "ready" in job.output, 30)
        job.process.terminate()
        wait_without_trouble(job)
    assert (job.status, job.output, job.errors) == (status, f"ready\n{said}", "")


# Where the ranks meet.


def test_a_port_that_is_in_use_is_passed_over():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        free = meeting_point.free_port(port)
    assert free > port
    assert meeting_point.free_port(free) == free


@pytest.mark.parametrize(
    ("interfaces", "name_leads_to", "expected"),
    [
        ({"eth0": "10.0.0.1"}, "10.0.0.1", ("node1", "eth0")),
        # As on JUWELS: the name leads into another network than the fast one.
        ({"eth0": "10.0.0.1", "ib0": "10.9.0.1"}, "10.0.0.1", ("10.9.0.1", "ib0")),
        ({"ib0": "10.9.0.1", "hsn0": "10.8.0.1"}, "10.8.0.1", ("node1", "hsn0")),
        # As Debian writes it into /etc/hosts.
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1"}, "127.0.1.1", ("10.0.0.1", "eth0")),
        # On a local cluster without namespaces.
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1"}, None, ("127.0.0.1", "lo")),
        ({}, "10.0.0.1", ("node1", "")),  # none is found: gloo and NCCL choose themselves
    ],
)
def test_a_node_is_reached_through_its_fast_network(
    interfaces, name_leads_to, expected, monkeypatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(meeting_point, "interfaces", lambda: interfaces)
    leads_to = [name_leads_to] if name_leads_to else []
    monkeypatch.setattr(meeting_point, "addresses_of", lambda name: leads_to)
    slurm_says = b"NodeName=node1\n NodeAddr=127.0.0.1 NodeHostName=here\n"
    monkeypatch.setattr(subprocess, "check_output", mock.Mock(return_value=slurm_says))
    assert meeting_point.address_and_interface("node1") == expected


@pytest.mark.parametrize(
    ("interface", "gloo", "nccl"), [("hsn0", "hsn0", "hsn"), ("eth0", "eth0", "eth0"), ("", "", "")]
)
def test_nccl_is_told_the_beginning_of_the_names_of_all_fast_cards(
    interface, gloo, nccl, monkeypatch
):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found = meeting_point.variables_of(interface)
    assert found.get("GLOO_SOCKET_IFNAME", "") == gloo
    assert found.get("NCCL_SOCKET_IFNAME", "") == nccl


def test_this_machine_has_a_way_to_itself():
    assert meeting_point.interfaces()["lo"] == "127.0.0.1"
    assert meeting_point.interface_to("127.0.0.1", {}) == "lo"


# A stand-in for srun: what a real one shows only when a node is lost.

SRUN = """#!/bin/sh
echo "$@" >>srun.log
env | grep -E '^(SLURM_NTASKS|SLURM_HINT|SRUN_CPUS_PER_TASK)=' >>srun.log
while [ "${1#-}" != "$1" ]; do shift; done
SLURMD_NODENAME=node1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=0 \\
  SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_CPUS_ON_NODE=4 exec "$@"
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_CPUS_PER_NODE": "4"}
JOB |= {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_HINT": "nomultithread"}
JOB |= {"SRUN_CPUS_PER_TASK": "32"}


@pytest.fixture
def in_a_job(tmp_path, monkeypatch):
    """Commands in PATH that answer for Slurm, and the variables of a job on node1."""
    scontrol = '#!/bin/sh\ntest "$2" = node || exec echo node1\necho NodeAddr=127.0.0.1\n'
    for name, text in {"srun": SRUN, "scontrol": scontrol}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "MASTER_", "GLOO_", "NCCL_")):
            monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("container", [False, True], ids=["", "in a container"])
def test_in_a_job_srun_gets_all_from_its_options(container, tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(3)"
    )
    if container:  # with commands of its own only: none of Slurm's
        python = f'#!/bin/sh\nPATH=/usr/bin:/bin IN_CONTAINER=yes exec {sys.executable} "$@"\n'
        (tmp_path / "python.sh").write_text(python)
        (tmp_path / "python.sh").chmod(0o755)
        monkeypatch.setenv("PYTHON", "./python.sh")
    status, output = launch("--monitor", "rank.py", "a b", "--", "-x", cwd=tmp_path)
    assert status == 3, output
    assert "nodes: node1, ranks on each: 1, in all: 1\nmeeting point: " in output
    assert "The first to fail: rank 0 on node1 ended with exit status 3.\n" in output
    arguments, variables = json.loads(re.search(r"^\[\[.*$", output, re.M)[0])
    assert arguments == ["a b", "--", "-x"]
    assert ("IN_CONTAINER" in variables) == container
    address, port = variables["MASTER_ADDR"], variables["MASTER_PORT"]
    point = f"meeting point: {address}:{port}, interface {variables['GLOO_SOCKET_IFNAME']}\n"
    assert point in output
    ask, step = (tmp_path / "srun.log").read_text().splitlines()  # no variable is in between
    assert ask.startswith("--export=ALL --nodes=1 --ntasks=1 --nodelist=node1 --overlap ")
    assert " --as-task --monitor " in step
    assert (tmp_path / "logs" / "cpu-7.0-node1.out").exists()


@pytest.mark.usefixtures("in_a_job")
def test_on_several_nodes_an_address_of_this_machine_is_refused(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1 node2\n")
    status, output = launch("9", cwd=tmp_path, env={"MASTER_ADDR": "127.0.0.1"})
    sentence = "MASTER_ADDR is 127.0.0.1, where each node finds only itself: unset MASTER_ADDR\n"
    assert (status, output) == (1, sentence)


@pytest.mark.usefixtures("in_a_job")
def test_an_srun_that_waits_for_a_lost_node_is_killed(tmp_path):
    """After a failure and some silence; until then it is left alone."""
    lines = f"echo a rank says something >&2\nsleep 2\necho '{BEFORE}' >&2\nexec sleep 600\n"
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{lines}")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from launcher import allocation
sys.exit(allocation.supervise(["srun"], silence=1))
"""
    job = processes.run([sys.executable, "-c", code], 30, stderr=subprocess.PIPE)
    assert (job.status, job.left) == (128 + signal.SIGKILL, [])
    assert job.errors.splitlines() == [
        "a rank says something",
        "A node does not answer: see the one with a * in sinfo -N. srun still waited for it.",
        "The first to fail: rank 5 on node2 ended with signal KILL.",
    ]


# The GPUs of imitated nodes. tests/standin answers for torch.

SHOW = f"""
masks = [f"{{x.partition('_')[0]}}={{os.environ[x]}}" for x in {gpus.MASKS} if x in os.environ]
os.write(1, f"rank {{rank}} may see {{' '.join(masks)}}\\n".encode())
"""
# A /dev of its own with dxg, which is there on Windows (WSL2), and nothing else of a GPU.
DEVICES = """
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
for name in null zero full random urandom tty; do
  : >"$1/$name"
  mount --bind "/dev/$name" "$1/$name"
done
mkdir "$1/shm"
mount --rbind /dev/shm "$1/shm"
ln -s /proc/self/fd "$1/fd"
: >"$1/dxg"
mount --rbind "$1" /dev
shift
exec "$@"
"""
FOUR = {"STANDIN_GPUS": "4"}


@pytest.mark.parametrize(
    ("nodes", "variables", "on", "rows"),
    [
        ("2x1", {"CUDA_VISIBLE_DEVICES": "2,3"}, "on 2 GPUs", ["CUDA=2", "CUDA=3"]),
        # Slurm sets ROCR's on AMD's GPUs. What it leaves is counted from 0.
        (
            "2x1",
            {"STANDIN_KIND": "hip", "ROCR_VISIBLE_DEVICES": "2,3"},
            "on 2 GPUs",
            ["HIP=0 ROCR=2,3", "HIP=1 ROCR=2,3"],
        ),
        ("2x1", {"STANDIN_KIND": "xpu"}, "on 4 GPUs", ["ZE=0", "ZE=1"]),
        # Of a divided GPU a process sees one part, so the ranks share that one.
        (
            "1x2",
            {"STANDIN_MIG": "1", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
            "on 1 GPUs",
            ["CUDA=MIG-a,MIG-b"] * 2,
        ),
    ],
)
def test_imitated_nodes_divide_the_gpus_that_the_user_has_left_visible(
    nodes, variables, on, rows, start, tmp_path, monkeypatch
):
    if os.geteuid() or not works("unshare", "--mount", "true"):
        cannot("needs root and the right to make a mount namespace")
    for name in gpus.MASKS:
        monkeypatch.delenv(name, raising=False)
    given = {**FOUR, "PYTHONPATH": str(ROOT / "tests" / "standin"), **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "dev").mkdir()
    own = ["unshare", "--mount", "sh", "-c", DEVICES, "sh", tmp_path / "dev"]
    with start(SHOW, nodes, before=own) as job:
        wait_without_trouble(job)
    assert f", {on}" in job.output, job.output + job.errors
    seen = sorted(re.findall(r"^rank \d+ may see (.*)$", job.output, re.M))
    assert seen == rows


@pytest.mark.parametrize(
    ("visible", "nodes", "each", "masks", "words"),
    [
        ("", 2, 1, ["", ""], "the CPU"),
        ("2 3", 2, 1, ["2", "3"], "2 GPUs"),
        ("0 1 2 3", 2, 2, ["0,1", "2,3"], "4 GPUs"),
        ("0", 2, 2, ["", ""], "1 GPUs"),  # all share it, and see so
        ("0 1", 2, 2, ["-1", "-1"], "the CPU, because there are fewer GPUs than ranks"),
    ],
)
def test_gpus_are_shared_out(visible, nodes, each, masks, words):
    found = ["CUDA_VISIBLE_DEVICES", *visible.split()] if visible else []
    variables, on = gpus.share_gpus(found, nodes, each)
    assert [node.get("CUDA_VISIBLE_DEVICES", "") for node in variables] == masks
    assert on == words


@pytest.mark.parametrize(
    ("kind", "masks", "name", "expected"),
    [
        ("cuda", {}, "CUDA_VISIBLE_DEVICES", "0 1 2 3"),
        ("cuda", {"CUDA": " 2 , 3"}, "CUDA_VISIBLE_DEVICES", "2 3"),
        (
            "cuda",
            {"CUDA": "GPU-5ad10003,GPU-5ad10001"},
            "CUDA_VISIBLE_DEVICES",
            "GPU-5ad10003 GPU-5ad10001",
        ),
        ("cuda", {"CUDA": "-1"}, "", ""),
        ("hip", {}, "HIP_VISIBLE_DEVICES", "0 1 2 3"),
        # HIP takes CUDA's variable, too, but its own wins: so its own is set.
        ("hip", {"CUDA": "3,1"}, "HIP_VISIBLE_DEVICES", "3 1"),
        ("hip", {"CUDA": "3,1", "HIP": "2"}, "HIP_VISIBLE_DEVICES", "2"),
        ("hip", {"ROCR": "1,2,3", "HIP": "2,0"}, "HIP_VISIBLE_DEVICES", "2 0"),
        ("xpu", {"CUDA": "0"}, "ZE_AFFINITY_MASK", "0 1 2 3"),
        ("xpu", {"ZE": "3,1"}, "ZE_AFFINITY_MASK", "3 1"),
        # ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE: a GPU is one device, and the mask names its stacks.
        ("xpu", {"ZE": "2.0,2.1,0.1", "FLAT": ""}, "ZE_AFFINITY_MASK", "2.0,2.1 0.1"),
        ("none", {}, "", ""),
    ],
)
def test_gpus_are_called_as_the_variable_of_their_maker_has_them(
    kind, masks, name, expected, monkeypatch
):
    standin = load(ROOT / "tests" / "standin" / "sitecustomize.py")
    for mask in gpus.MASKS:
        monkeypatch.delenv(mask, raising=False)
        with contextlib.suppress(KeyError):
            monkeypatch.setenv(mask, masks[mask.partition("_")[0]])
    monkeypatch.setenv("STANDIN_KIND", kind)
    monkeypatch.setenv("STANDIN_GPUS", "4")
    if "FLAT" in masks:
        monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    torch = SimpleNamespace(accelerator=mock.Mock(), version=SimpleNamespace(hip=kind == "hip"))
    torch.accelerator.device_count.return_value = 0 if kind == "none" else len(standin.visible())
    torch.accelerator.current_accelerator.return_value.type = standin.KINDS[kind]
    assert gpus.name_gpus(torch) == (name, expected.split())


@pytest.mark.parametrize(
    ("files", "there"),
    [
        ({}, False),
        ({"dev/nvidia0": ""}, True),
        ({"dev/nvidiactl": ""}, False),
        ({"dev/kfd": ""}, True),
        # Intel: of a computing centre, in a laptop; then the screen of a server.
        ({"vendor": "0x8086\n", "class": "0x038000\n"}, True),
        ({"vendor": "0x8086\n", "class": "0x030000\n"}, False),
        ({"vendor": "0x1a03\n", "class": "0x038000\n"}, False),
    ],
)
def test_a_machine_with_gpus_is_known_by_its_files(files, there, tmp_path):
    for name, text in {"dev/dri/renderD128": "", **files}.items():
        card = "" if "/" in name else "sys/class/drm/renderD128/device"
        file = tmp_path / card / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert gpus.has_gpus(tmp_path) == there
