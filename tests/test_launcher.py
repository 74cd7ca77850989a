"""The launcher without Slurm: it starts ranks, names the first to fail, and leaves nothing behind.

What Slurm would tell it stands in dictionaries here; tests/test_slurm.py has a real one.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import LAUNCHER, ROOT, cannot, launch, load, need, wait_for
from launcher import errors, gpus, meeting_point, processes, srun_options, task

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
PLACES = {"in its session": "process_group=0", "in another session": "start_new_session=True"}
MASKS = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]
IMPORT = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
FAST = {"grace": 1, "settle": 1, "patience": 1}  # seconds, and no more on a busy machine


@pytest.fixture
def start(tmp_path):
    """A function that starts the launcher with ranks that run a text; it returns the Job."""

    def job(text, nodes="2", *options, limit=100):
        (tmp_path / "rank.py").write_text(BEGIN + text)
        command = [LAUNCHER, "--local", nodes, *options]
        command += [tmp_path / "rank.py", "a b", "--", "-x"]
        # With the time that the launcher itself needs to end its ranks.
        return processes.Job(command, limit, cwd=tmp_path, stderr=subprocess.PIPE)

    return job


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function that writes a program into the first folder of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name, text):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    return write


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


def test_what_the_user_has_set_stays_and_a_lesson_is_found_by_its_name(tmp_path):
    env = {"MASTER_PORT": "1234", "OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"}
    lesson = ("9_torch_dist_multi_node.py", "a b")
    status, output = launch("--local", "2", "--dry-run", *lesson, cwd=tmp_path, env=env)
    assert status == 0
    assert "meeting point: 127.0.0.1:1234, interface eth9\neach rank: 7 threads of " in output
    assert output.endswith("day2/9_torch_dist_multi_node.py 'a b'\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Which lesson?"),
        (("--local", "2x", "9"), "--local: wants N or NxM"),
        (("--locale", "9"), "There is no option --locale"),
        (("--local", "1", "nothing.py"), "There is no lesson and no file 'nothing.py'"),
    ],
)
def test_bad_input_gets_one_message(arguments, sentence, tmp_path):
    status, output = launch(*arguments, cwd=tmp_path)
    assert status == 1
    assert len(output.splitlines()) == 1
    assert output.startswith(sentence)


def test_srun_cannot_start_what_starts_srun(tmp_path):
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


def test_monitor_notes_how_busy_each_node_is(start, program, tmp_path):
    need("vmstat")
    # There are no GPUs here: something in the place of their maker's tool.
    program("nvidia-smi", '#!/bin/sh\necho "$@"\nexec sleep 60\n')
    with start("time.sleep(2.5)", "2x2", "--monitor") as job:
        wait_without_trouble(job)
    for kind, words in {"cpu": " us sy id ", "gpu": "utilization.gpu"}.items():
        logs = sorted(tmp_path.glob(f"logs/{kind}-*.out"))
        assert [log.name[-11:] for log in logs] == ["-node-0.out", "-node-1.out"]
        assert all(words in log.read_text() for log in logs)


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


FIRST = "launcher: 1700000002.250000 rank 5 on node2 ended with signal KILL"
LATER = "launcher: 1700000002.500000 rank 0 on node1 ended with exit status 1"
LOST = "Slurm has lost node2, or cannot reach it. The rest follows from that."


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        ([LATER, FIRST], 0, "The first to fail: rank 5 on node2 ended with signal KILL."),
        (["srun: error: Node failure on node2"], 0, LOST),
        (["srun: error: Task launch for StepId=7.0 failed on node node2: Bad"], 0, LOST),
        ([LATER.replace("status 1", "status 69")], 69, ""),
        (["  exitcode  : 69 (pid: 71)"], 69, ""),  # torchrun itself ends with 1
        # Ranks that did not meet: rank 0, and another one.
        (["Timed out after 61 seconds waiting for clients. 1/2"], 0, "DIST_TIMEOUT=300"),
        (["The client socket has timed out after 60000ms"], 0, "DIST_TIMEOUT=300"),
    ],
)
def test_what_is_said_on_stderr_tells_why_a_job_ended(lines, status, said, capfd):
    verdict = errors.Verdict()
    for line in lines:
        verdict.take(f"{line}\n".encode())
    passed_on = capfd.readouterr().err.splitlines()
    assert passed_on == [line for line in lines if not line.startswith("launcher: ")]
    assert verdict.conclude() == status
    text = capfd.readouterr().err
    assert said in text if said else text == ""


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


def test_at_a_time_limit_all_is_ended():
    text = STUBBORN.format(options=PLACES["in another session"]) + "time.sleep(600)\n"
    job = processes.run([sys.executable, "-c", text], 5, **FAST)
    assert job.trouble == "stopped after 5 s, processes left: 1"
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


def test_without_proc_the_process_group_counts(monkeypatch, tmp_path):
    """As on a Mac."""
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    job = processes.run(["sh", "-c", "sleep 600 & echo started $!; wait"], 2, **FAST)
    assert job.stopped
    assert wait_for(lambda: not lives(*started(job)), 5)


def test_a_job_gives_its_lines_while_it_runs():
    command = ["sh", "-c", r"printf 'one\ntw\377o\r'; echo bad >&2; sleep 0.1; echo end; sleep 60"]
    with processes.Job(command, 60, stderr=subprocess.PIPE) as job:
        lines = job.lines()
        assert next(lines) == "one\n"
        assert next(lines) == "tw\N{REPLACEMENT CHARACTER}o\rend\n"
        assert job.status is None
        assert wait_for(lambda: job.errors == "bad\n", 10)
    assert job.status == -signal.SIGTERM


# A command of the course that waits for another one.
WAITS = f"""{IMPORT}
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


def test_gpus_are_counted_where_slurm_only_lists_them():
    """As at Jülich."""
    assert srun_options.count_gpus({"SLURM_STEP_GPUS": "0,1", "SLURM_JOB_GPUS": "0,1,2"}) == 2


def test_nodes_with_unequal_cpus_get_their_ranks_by_name():
    given = {"SLURM_JOB_CPUS_PER_NODE": "8,4"}
    cpus, words = srun_options.options_of(["node1", "node2"], [2, 2], False, given)
    assert cpus == 2
    assert {"--nodelist=node1,node1,node2,node2", "--distribution=arbitrary"} <= set(words)


def test_torchrun_wants_all_gpus_of_a_node():
    given = {"SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1"}
    with pytest.raises(SystemExit, match="With --torchrun a node has one task, and --gpus-per-ta"):
        srun_options.options_of(["node1", "node2"], [2, 2], True, given)


# What Slurm and the launcher tell the last of three tasks, which is alone on its node.
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
TASK |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
TASK |= {"SLURM_NODEID": "1", "SLURM_CPUS_ON_NODE": "1", "SLURMD_NODENAME": "node2"}
TASK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANKS_PER_NODE": "2 1"}


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_rank_hears_how_many_gpus_its_node_has(torchrun):
    """Slurm may show it only one; and a torchrun gets them all."""
    found = task.variables_of_rank({**TASK, "SLURM_GPUS_ON_NODE": "4"}, torchrun)
    assert found.get("GPUS_ON_NODE") == (None if torchrun else "4")


def test_a_machine_shares_its_cpus_among_the_threads_of_ranks(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert task.threads(cpus=8, ranks=2) == "4"
    assert task.threads(cpus=2, ranks=2) == "2"
    assert task.threads(cpus=0, ranks=16) == "1"


def test_sigterm_for_a_task_reaches_its_rank_and_nobody_has_failed(tmp_path):
    """With control groups Slurm signals only what it has started itself."""
    handler = "lambda *_: sys.exit(print('saved') or 3)"
    text = f"signal.signal(signal.SIGTERM, {handler})\nprint('ready')\ntime.sleep(60)\n"
    (tmp_path / "rank.py").write_text(BEGIN + text)
    command = [LAUNCHER, "--as-task", tmp_path / "rank.py"]
    options = {"cwd": tmp_path, "env": os.environ | TASK, "stderr": subprocess.PIPE, **FAST}
    with processes.Job(command, 60, **options) as job:
        assert wait_for(lambda: "ready" in job.output, 30)
        job.process.terminate()
        wait_without_trouble(job)
    assert (job.status, job.output, job.errors) == (3, "ready\nsaved\n", "")


# Where the ranks meet.


@pytest.mark.parametrize(
    ("interfaces", "name_leads_to", "expected"),
    [
        ({"eth0": "10.0.0.1"}, "10.0.0.1", ("node1", "eth0")),
        # As on JUWELS: the name leads into another network than the fast one.
        ({"eth0": "10.0.0.1", "ib0": "10.9.0.1"}, "10.0.0.1", ("10.9.0.1", "ib0")),
        ({"ib0": "10.9.0.1", "hsn0": "10.8.0.1"}, "10.8.0.1", ("node1", "hsn0")),
        # As Debian writes it into /etc/hosts.
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1"}, "127.0.1.1", ("10.0.0.1", "eth0")),
        # On a local cluster without namespaces nobody knows the name.
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1"}, None, ("10.0.0.1", "eth0")),
        ({"lo": "127.0.0.1"}, None, ("127.0.0.1", "lo")),
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
    assert meeting_point.address_and_interface("node1") == expected


@pytest.mark.parametrize(("interface", "cards"), [("hsn0", "hsn"), ("eth0", "eth0")])
def test_nccl_is_told_the_beginning_of_the_names_of_all_fast_cards(interface, cards, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    expected = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": cards}
    assert meeting_point.variables_of(interface) == expected


# A stand-in for srun, for what a real one shows nowhere or only when a node is lost.

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
# Starts no container, but has none of Slurm's commands either.
APPTAINER = f"""#!/bin/sh
test "$1 $2 $3 $4 $5 $6" = "exec --nv --bind COURSE IMAGE python3" || exit 1
shift 6
PATH=/usr/bin:/bin IN_CONTAINER=yes exec {shlex.quote(sys.executable)} "$@"
"""


@pytest.fixture
def in_a_job(program, monkeypatch):
    """Commands in PATH that answer for Slurm, and the variables of a job on node1."""
    program("srun", SRUN)
    program("scontrol", "#!/bin/sh\necho node1\n")
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "MASTER_", "GLOO_", "NCCL_")):
            monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("container", [False, True], ids=["", "in a container"])
def test_in_a_job_srun_gets_all_from_its_options(container, program, tmp_path, monkeypatch):
    """And PYTHON may be the script of day2/SITES.md, which starts a container."""
    (tmp_path / "rank.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(3)"
    )
    if container:
        page = (ROOT / "day2" / "SITES.md").read_text()
        script = re.search(r"^```sh\n(#!/bin/sh\nexec apptainer .*?)^```$", page, re.M | re.S)[1]
        script = script.replace("<folder of the course>", "COURSE").replace("<image>.sif", "IMAGE")
        program("container.sh", script)
        program("apptainer", APPTAINER)
        monkeypatch.setenv("PYTHON", "./container.sh")
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


@pytest.mark.usefixtures("in_a_job")
def test_on_several_nodes_an_address_of_this_machine_is_refused(program, tmp_path):
    program("scontrol", "#!/bin/sh\necho node1 node2\n")
    status, output = launch("9", cwd=tmp_path, env={"MASTER_ADDR": "127.0.0.1"})
    sentence = "MASTER_ADDR is 127.0.0.1, where each node finds only itself: unset MASTER_ADDR\n"
    assert (status, output) == (1, sentence)


def test_an_srun_that_waits_for_a_lost_node_is_killed(program):
    """After a failure and some silence; until then it is left alone."""
    words = f"echo a rank says something >&2\nsleep 2\necho '{FIRST}' >&2\nexec sleep 600\n"
    program("srun", f"#!/bin/sh\n{words}")
    code = "from launcher import allocation; sys.exit(allocation.supervise(['srun'], silence=1))"
    job = processes.run([sys.executable, "-c", IMPORT + code], 30, stderr=subprocess.PIPE)
    assert (job.status, job.left) == (128 + signal.SIGKILL, [])
    assert job.errors.splitlines() == [
        "a rank says something",
        "A node does not answer: see the one with a * in sinfo -N. srun still waited for it.",
        "The first to fail: rank 5 on node2 ended with signal KILL.",
    ]


# The GPUs of imitated nodes. tests/gpu answers for torch.


def test_imitated_nodes_divide_the_gpus_that_the_user_has_left_visible(tmp_path, monkeypatch):
    for mask in MASKS:
        monkeypatch.delenv(mask, raising=False)
    given = {"STANDIN_GPUS": "4", "PYTHONPATH": str(ROOT / "tests" / "gpu")}
    given["CUDA_VISIBLE_DEVICES"] = "2,3"
    text = "os.write(1, f\"rank {rank} sees {os.environ['CUDA_VISIBLE_DEVICES']}\\n\".encode())"
    (tmp_path / "rank.py").write_text(BEGIN + text)
    (tmp_path / "nvidia0").touch()  # in a /dev of its own
    code = "from launcher import gpus, launch\n"
    code += "gpus.DEVICES = launch.Path()\nsys.exit(launch.main())"
    command = [sys.executable, "-c", IMPORT + code, "--local", "2", "rank.py"]
    job = processes.run(command, 100, cwd=tmp_path, env={**os.environ, **given})
    assert ", on 2 GPUs\n" in job.output
    assert sorted(job.output.splitlines()[3:]) == ["rank 0 sees 2", "rank 1 sees 3"]


@pytest.mark.parametrize(
    ("visible", "nodes", "each", "masks", "words"),
    [
        ("", 2, 1, ["", ""], "the CPU"),
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
        ("cuda", {"CUDA": "GPU-5ad10003"}, "CUDA_VISIBLE_DEVICES", "GPU-5ad10003"),
        ("cuda", {"CUDA": "-1"}, "", ""),
        # Of a divided GPU a process sees one part, so the ranks share that one.
        ("mig", {"CUDA": "MIG-a,MIG-b"}, "CUDA_VISIBLE_DEVICES", "MIG-a"),
        # HIP takes CUDA's variable, too, but its own wins: so its own is set.
        ("hip", {"CUDA": "3,1"}, "HIP_VISIBLE_DEVICES", "3 1"),
        ("hip", {"CUDA": "3,1", "HIP": "2"}, "HIP_VISIBLE_DEVICES", "2"),
        # Slurm sets ROCR's. What it leaves is counted from 0.
        ("hip", {"ROCR": "2,3"}, "HIP_VISIBLE_DEVICES", "0 1"),
        ("xpu", {"CUDA": "0", "ZE": "3,1"}, "ZE_AFFINITY_MASK", "3 1"),
        ("none", {}, "", ""),
    ],
)
def test_gpus_are_called_as_the_variable_of_their_maker_has_them(
    kind, masks, name, expected, monkeypatch
):
    standin = load(ROOT / "tests" / "gpu" / "sitecustomize.py")
    for mask in MASKS:
        monkeypatch.delenv(mask, raising=False)
    for maker, value in masks.items():
        mask = next(mask for mask in MASKS if mask.startswith(maker))
        monkeypatch.setenv(mask, value)
    monkeypatch.setenv("STANDIN_KIND", kind.replace("mig", "cuda"))
    monkeypatch.setenv("STANDIN_MIG", str(int(kind == "mig")))
    monkeypatch.setenv("STANDIN_GPUS", "4")
    torch = SimpleNamespace(accelerator=mock.Mock(), version=SimpleNamespace(hip=kind == "hip"))
    torch.accelerator.device_count.return_value = standin.device_count()
    torch.accelerator.current_accelerator.return_value.type = standin.KINDS[standin.kind()]
    assert gpus.name_gpus(torch) == (name, expected.split())
