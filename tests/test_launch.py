"""scripts/launcher/launch.py and what it is made of, without a shell before it and without Slurm."""

import importlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ROOT, copy_tree, processes, wait_for

launch = importlib.import_module("lib.launch")
slurm = importlib.import_module("launcher.slurm")
verdict = importlib.import_module("launcher.errors")

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


@pytest.fixture
def start(tmp_path):
    """A function that starts launch.py with ranks that run a text; it returns the Job."""
    copy_tree(ROOT / "scripts" / "lib", tmp_path / "lib")
    for name, constants in {"launch": "GRACE|LAST_WORDS", "processes": "SETTLE|PATIENCE"}.items():
        module = tmp_path / "lib" / f"{name}.py"
        text, count = re.subn(rf"(?m)^({constants}) = [\d.]+", r"\1 = 1", module.read_text())
        assert count == 2
        module.write_text(text)

    def job(text, nodes="2", *options, before=(), limit=60):
        (tmp_path / "rank.py").write_text(BEGIN + text)
        command = [*before, sys.executable, tmp_path / "lib" / "launch.py", "local", nodes]
        command += [*options, "--", tmp_path / "rank.py", "a b", "--", "-x"]
        return processes.Job(command, limit, cwd=tmp_path, stderr=subprocess.PIPE)

    return job


def wait_without_trouble(job):
    job.wait()
    assert not job.stopped, job.output + job.errors
    assert job.left == [], job.left


def test_each_rank_gets_its_variables_and_all_arguments(start, monkeypatch):
    for name in ("MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    text = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
os.write(1, f"{' '.join(os.environ[name] for name in names)} {sys.argv[1:]}\\n".encode())
"""
    with start(text, "2x3") as job:
        wait_without_trouble(job)
    assert (job.status, job.errors) == (0, "")
    port = re.search(r"^meeting point: 127\.0\.0\.1:(\d+), interface lo", job.output, re.M)[1]
    rows = sorted(job.output.splitlines()[3:])
    expected = [f"{r} {r % 3} 6 3 127.0.0.1 {port} ['a b', '--', '-x']" for r in range(6)]
    assert rows == expected


def test_the_first_to_fail_is_named_though_others_fail_later(start):
    """And it is the first in time, not in number; its exit status is the launcher's."""
    text = """
if rank == 2:
    after("ready0", "ready1")
    sys.exit(5)
done(f"ready{rank}")
while os.getppid() and not pathlib.Path("go").exists():
    time.sleep(0.02)
    if pathlib.Path("ready0").exists() and pathlib.Path("ready1").exists():
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


def test_a_rank_that_ignores_sigterm_and_keeps_stdout_open_is_ended(start):
    """So are its children, in whatever session, and what they say in the meantime is passed on."""
    text = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for place in ({}, {"process_group": 0}, {"start_new_session": True}):
        print("started", subprocess.Popen(["sleep", "600"], **place).pid, flush=True)
    print("started", os.getpid(), flush=True)
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
    assert len(re.findall(r"^started \d+$", job.output, re.M)) == 4  # and none of them is left


def test_what_ranks_leave_behind_is_ended_and_named(start):
    text = """
if rank == 1:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
    with start(text) as job:
        wait_without_trouble(job)
    assert job.status == 0
    assert re.fullmatch(r"Left behind by a rank, ended now: process \d+ sleep 600\n", job.errors), (
        job.errors
    )


def test_nobody_waits_for_a_pipe_that_cannot_be_closed(start):
    """A process without the mark, in another session, is not found. The launcher ends anyway."""
    text = """
if rank == 1:
    sleep = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    print("started", sleep.pid, flush=True)
"""
    with start(text, limit=20) as job:
        job.wait()
    os.kill(int(re.search(r"^started (\d+)$", job.output, re.M)[1]), signal.SIGKILL)
    assert not job.stopped
    assert job.status == 0


def test_status_69_is_handed_on_and_nobody_is_named(start):
    text = """
if rank == 1:
    print("This machine has no wheels.", file=sys.stderr)
    sys.exit(69)
time.sleep(600)
"""
    with start(text) as job:
        wait_without_trouble(job)
    assert (job.status, job.errors) == (69, "This machine has no wheels.\n")


@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("TERM", 130), ("HUP", 129)])
def test_a_launcher_that_is_stopped_ends_its_ranks(name, status, start):
    number = signal.Signals[f"SIG{name}"]
    text = """
def end(*_):
    os.write(2, f"rank {rank} is told to end\\n".encode())  # at once: two ranks write
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
os.write(1, f"ready {rank}\\n".encode())
time.sleep(600)
"""
    # The tests may run where Ctrl-C is ignored.
    python = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    python += "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    with start(text, before=(sys.executable, "-c", python)) as job:
        assert wait_for(lambda: job.output.count("ready ") == 2, 30)
        job.process.send_signal(number)
        wait_without_trouble(job)
    assert job.status == status
    assert sorted(job.errors.splitlines()) == [f"rank {rank} is told to end" for rank in (0, 1)]


def test_ranks_ignore_the_warning_of_slurm_where_the_shell_did(start):
    text = "print('ignored', signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, flush=True)"
    before = ("bash", "-c", "trap '' USR1 USR2; exec \"$@\"", "bash")
    with start(text, "1", before=before) as job:
        wait_without_trouble(job)
    assert "ignored True\n" in job.output


# What Slurm tells a task that is alone.
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
TASK |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TASK |= {"SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "1", "SLURMD_NODENAME": "node1"}
TASK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("handler", "status", "said"),
    [
        ("lambda *_: sys.exit(print('saved'))", 0, "saved\n"),
        ("lambda *_: sys.exit(3)", 3, ""),
        ("signal.SIG_DFL", 128 + signal.SIGTERM, ""),
    ],
)
def test_sigterm_for_a_task_reaches_its_rank_and_nobody_has_failed(handler, status, said, tmp_path):
    """With control groups Slurm signals only what it has started, which is launch.py."""
    text = f"signal.signal(signal.SIGTERM, {handler})\nprint('ready')\ntime.sleep(60)\n"
    (tmp_path / "rank.py").write_text(BEGIN + text)
    command = [sys.executable, ROOT / "scripts" / "launcher" / "launch.py", "task", "--address", "here"]
    command += ["--", tmp_path / "rank.py"]
    options = {"cwd": tmp_path, "env": os.environ | TASK, "stderr": subprocess.PIPE}
    with processes.Job(command, 60, **options) as job:
        assert wait_for(lambda: "ready" in job.output, 30)
        job.process.terminate()
        wait_without_trouble(job)
    assert (job.status, job.output, job.errors) == (status, f"ready\n{said}", "")


@pytest.mark.parametrize(
    ("options", "torchrun", "restarts"),
    [
        ([], False, None),
        (["--torchrun"], True, "0"),
        (["--max-restarts", "0"], True, "0"),
        (["--max-restarts", "3"], True, "3"),
    ],
)
def test_torchrun_starts_the_ranks_where_it_is_asked_for(options, torchrun, restarts, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    args = launch.parse_args(["local", "2x3", *options, "--", "file.py", "--", "--torchrun"])
    variables = {"RANK": "1", "WORLD_SIZE": "2", "RANKS_PER_NODE": "3"}
    variables |= {"MASTER_ADDR": "node1", "MASTER_PORT": "20001"}
    command, environment = launch.command_of(args, variables, "10.0.0.2")
    assert command[-3:] == ["file.py", "--", "--torchrun"]
    assert ("torch.distributed.run" in command) == torchrun
    assert ("RANK" in environment) == (not torchrun)
    if torchrun:
        assert "TORCH_ELASTIC_WORKER_IDENTICAL" not in environment
        given = dict(itertools.pairwise(command))
        assert given["--max-restarts"] == restarts
        assert given["--redirects"] == ("2" if restarts == "3" else "0")
        assert (given["--nnodes"], given["--nproc-per-node"]) == ("2", "3")
        assert given["--rdzv-endpoint"] == "node1:20001"
        assert given["--rdzv-conf"] == "is_host=0"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exit status 3"),
        (-signal.SIGKILL, "signal KILL"),
        (-signal.SIGSEGV, "signal SEGV"),
        (128 + signal.SIGTERM, "signal TERM"),  # of a shell around it
        (200, "exit status 200"),  # there are not so many signals
        (255, "exit status 255"),
    ],
)
def test_an_end_in_words(status, words):
    assert verdict.ending(status) == words


@pytest.mark.parametrize(("status", "same"), [(0, 0), (3, 3), (-9, 137), (255, 255)])
def test_a_status_as_a_shell_gives_it(status, same):
    assert verdict.as_a_shell(status) == same


def judge(*lines):
    """Have lines of stderr judged; return the Verdict."""
    found = verdict.Verdict()
    for line in lines:
        found.take(f"{line}\n".encode())
    return found


def test_of_tasks_that_failed_the_first_in_time_is_named(capfd):
    found = judge(
        "launcher: 1700000002.500000 rank 0 on node1 ended with exit status 1",
        "something else",
        "launcher: 1700000002.250000 rank 5 on node2 ended with signal KILL",
        "launcher: 1700000010.000000 rank 3 on node1 ended with exit status 1",
        "launcher: what a user says",
    )
    assert found.conclude() == 0
    assert capfd.readouterr().err == (
        "something else\nlauncher: what a user says\n"
        "The first to fail: rank 5 on node2 ended with signal KILL.\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Node failure on node2",
        "srun: error: Task launch for StepId=7.0 failed on node node2: Communication failure",
    ],
)
def test_a_lost_node_is_named(line, capfd):
    assert judge(line).conclude() == 0
    last = "Slurm has lost node2, or cannot reach it. The rest follows from that."
    assert capfd.readouterr().err.splitlines() == [line, last]


@pytest.mark.parametrize(
    "line",
    [
        "launcher: 1700000002.500000 rank 0 on node1 ended with exit status 69",
        "  exitcode  : 69 (pid: 71)",
    ],
)
def test_what_cannot_run_has_not_failed(line, capfd):
    assert judge(line).conclude() == 69
    assert "fail" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "line",
    [  # of rank 0, and of the others
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 ",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect",
    ],
)
def test_ranks_that_did_not_meet_are_told_how_to_wait_longer(line, capfd):
    first = "launcher: 1700000002.500000 rank 0 on node1 ended with exit status 1"
    assert judge(line, first).conclude() == 0
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("The ranks did not meet in time. If a node was slow to read Python's ")
    assert "export DIST_TIMEOUT=300" in last


def test_where_all_is_well_nothing_is_said(capfd):
    assert judge().conclude() == 0
    assert capfd.readouterr().err == ""


def test_an_srun_that_waits_for_a_lost_node_is_killed(tmp_path):
    """After a failure and some silence; until then it is left alone."""
    srun = tmp_path / "srun"
    os.symlink(os.path.realpath("/bin/sleep"), srun)
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "scripts")!r})
from launcher import errors as verdict
verdict.SILENCE = 1
found, parent = verdict.Verdict(), int(sys.argv[1])
verdict.pass_on(found, 0, lambda: verdict.kill_srun(parent))
found.conclude()
"""
    ours, theirs = os.pipe()
    waits = subprocess.Popen([srun, "60"])
    other = subprocess.Popen(["sleep", "60"])
    command = [sys.executable, "-c", code, str(os.getpid())]
    try:
        with processes.Job(command, 30, stdin=ours, stderr=subprocess.PIPE) as job:
            os.close(ours)
            os.write(theirs, b"a rank says something\n")
            assert wait_for(lambda: job.errors, 20)
            time.sleep(2)
            assert waits.poll() is None
            os.write(
                theirs, b"launcher: 1700000002.500000 rank 1 on node2 ended with signal KILL\n"
            )
            assert waits.wait(20) == -signal.SIGKILL
            os.close(theirs)
            job.wait()
        assert other.poll() is None
    finally:
        for process in (waits, other):
            process.kill()
            process.wait()
    assert job.errors.splitlines() == [
        "a rank says something",
        "A node does not answer: see the one with a * in sinfo -N. srun still waited for it.",
        "The first to fail: rank 1 on node2 ended with signal KILL.",
    ]


def test_a_port_that_is_in_use_is_passed_over():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        free = launch.free_port(port)
    assert free > port
    assert launch.free_port(free) == free


@pytest.mark.parametrize(
    ("cpus", "ranks", "machine", "expected"),
    [(8, 2, 8, "4"), (2, 2, 8, "2"), (8, 16, 8, "1"), (0, 1, 8, "1")],
)
def test_threads_are_shared(cpus, ranks, machine, expected, monkeypatch):
    monkeypatch.setattr(launch.os, "cpu_count", lambda: machine)
    assert launch.threads(cpus, ranks) == expected


# Slurm's lists, and what is asked of srun.


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4", [4]),
        ("4(x2),3", [4, 4, 3]),
        ("1,128(x3)", [1, 128, 128, 128]),
        ("3 2", [3, 2]),
        ("", []),
    ],
)
def test_a_list_of_slurm_is_read(text, numbers):
    assert slurm.expand(text) == numbers


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1"}, 4),
        ({"SLURM_STEP_GPUS": "0,1", "SLURM_JOB_GPUS": "0,1,2"}, 2),
        ({"SLURM_JOB_GPUS": "3"}, 1),
    ],
)
def test_gpus_are_counted_where_slurm_only_lists_them(environment, gpus):
    assert slurm.count_gpus(environment) == gpus


@pytest.mark.parametrize(
    ("environment", "shared", "ranks"),
    [
        ({}, False, [2, 1]),  # nobody asked for tasks: as many as GPUs
        ({"SLURM_TASKS_PER_NODE": "128(x2)"}, False, [2, 1]),  # about CPUs
        ({"SLURM_NTASKS_PER_NODE": "4"}, False, [4, 4]),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "8"}, False, [4, 4]),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "3,2"}, False, [3, 2]),
        (
            {
                "SLURM_NTASKS_PER_NODE": "4",
                "SLURM_NTASKS": "5",
                "SLURM_TASKS_PER_NODE": "3,2",
            },
            False,
            [3, 2],
        ),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, False, [1, 1]),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, True, [2, 1]),  # the shells
    ],
)
def test_as_many_ranks_as_tasks_were_asked_for_else_as_gpus(environment, shared, ranks):
    assert slurm.choose_ranks(2, [2, 1], shared, environment) == ranks


NODES = ["node1", "node2"]


@pytest.mark.parametrize(
    ("cpus_on", "wanted", "ranks", "cpus", "options"),
    [
        ("8(x2)", "", [2, 2], 4, "--ntasks=4 --nodes=2 --ntasks-per-node=2 --distribution=block"),
        ("8(x2)", "2", [2, 2], 2, "--ntasks=4 --nodes=2 --ntasks-per-node=2 --cpus-per-task=2"),
        ("8(x2)", "", [2, 1], 4, "--nodelist=node1,node1,node2 --distribution=arbitrary"),
        ("8,4", "", [2, 2], 2, "--nodelist=node1,node1,node2,node2 --distribution=arbitrary"),
        ("2(x2)", "", [4, 4], 0, "--cpus-per-task=1 --overcommit"),
    ],
)
def test_srun_is_told_where_each_rank_goes(cpus_on, wanted, ranks, cpus, options):
    environment = {"SLURM_JOB_CPUS_PER_NODE": cpus_on, "SLURM_CPUS_PER_TASK": wanted}
    found, words = slurm.options_of(NODES, ranks, False, environment)
    assert found == cpus
    assert set(options.split()) <= set(words)
    assert ("--overcommit" in words) == ("--overcommit" in options)


@pytest.mark.parametrize(
    ("given", "probe", "said"),
    [
        ({}, "0 2 20001 10.0.0.1 ib0", "10.0.0.1:20001, interface ib0"),
        ({}, "0 2 20001 node1 ", "node1:20001, interface -"),  # none was found
        (
            {"MASTER_ADDR": "n1i", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "ib1"},
            "0 2 20001 10.0.0.1 ib0",
            "n1i:1, interface ib1",
        ),
    ],
)
def test_the_plan_is_made_of_what_the_first_node_answers(given, probe, said, monkeypatch, capsys):
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_CPUS_PER_NODE": "8(x2)", **given}.items():
        monkeypatch.setenv(name, value)
    words = ["plan", "--nodes", "node1 node2", "--probes", probe]
    launch.print_plan(launch.parse_args([*words, "--", "launcher", "a b"]))
    text, address, port, each, *command, end = capsys.readouterr().out.split("\0")
    assert f"meeting point: {said}\neach rank: 4 CPUs, " in text
    assert f"{address}:{port}, " in said
    assert each == "2"
    assert (command[-2:], end) == (["launcher", "a b"], "")


def test_with_torchrun_a_node_has_one_task_and_all_cpus_of_its_ranks():
    environment = {"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}
    cpus, words = slurm.options_of(NODES, [2, 1], True, environment)
    assert cpus == 4
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"} <= set(words)


# The GPUs of imitated nodes. tests/test_masks.py has those that torch finds.


@pytest.mark.parametrize(
    ("gpus", "nodes", "each", "masks", "words"),
    [
        ("", 2, 1, ["", ""], "the CPU"),
        ("2 3", 2, 1, ["2", "3"], "2 GPUs"),
        ("0 1 2 3", 2, 2, ["0,1", "2,3"], "4 GPUs"),
        ("0", 2, 2, ["", ""], "1 GPUs"),
        ("0 1", 2, 2, ["-1", "-1"], "the CPU, because there are fewer GPUs than ranks"),
    ],
)
def test_gpus_are_shared_out(gpus, nodes, each, masks, words):
    found = ["CUDA_VISIBLE_DEVICES", *gpus.split()] if gpus else []
    variables, on = launch.share_gpus(found, nodes, each)
    assert [node.get("CUDA_VISIBLE_DEVICES", "") for node in variables] == masks
    assert on == words
