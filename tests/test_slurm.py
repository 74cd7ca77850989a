"""A real Slurm, as people type: allocations, batch jobs, and the cluster of local_slurm.sh."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from clusters import bring_up
from helpers import LAUNCHER, LESSONS, ROOT, cannot, copy_tree, need, proof_of, proves, wait_for

# Word for word what day2/NODES.md tells people to type, the account apart.
SALLOC = shlex.split(
    "salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=abc_g"
)
SCRIPT = ROOT / "scripts" / "sbatch_run.sh"

# Allocations.


def places(output):
    """Return lesson 9's rows: [(rank, host, local rank), ...]."""
    rows = re.findall(r"^rank (\d+) of \d+ on (\S+), local rank (\d+), ", output, re.M)
    return [(int(rank), host, int(local)) for rank, host, local in rows]


def test_the_salloc_line_and_lesson_9(slurm, tmp_path):
    typed = f"srun hostname\n{shlex.quote(str(LAUNCHER))} 9\nexit\n"
    done = slurm.run(*SALLOC, "bash", input=typed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:8]) == ["node1"] * 4 + ["node2"] * 4
    assert lines[8] == "nodes: node1 node2, ranks on each: 4, in all: 8"
    assert re.fullmatch(r"meeting point: node1:\d+, interface eth0", lines[9])
    assert lines[10].startswith("each rank: 32 CPUs, ")
    assert places(done.stdout) == [(rank, f"node{rank // 4 + 1}", rank % 4) for rank in range(8)]
    assert proof_of(done.stdout).startswith("=> 2 nodes, 8 ranks: every rank holds 28; the sum")
    assert proves(done.stdout)


def test_the_salloc_line_and_lesson_10(slurm, tmp_path):
    done = slurm.run(*SALLOC, LAUNCHER, "10", "--images", 640, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nnodes: node1 node2, ranks on each: 4, in all: 8\n" in f"\n{done.stdout}"
    assert proves(done.stdout)


# Prints some of its variables in one short piece: longer lines of several ranks may mix.
SHOW = """import json, os, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
found = {name: os.environ.get(name) for name in names} | {"HOST": socket.gethostname()}
os.write(1, (json.dumps(found) + "\\n").encode())
"""


@pytest.fixture
def show(tmp_path):
    """A script that prints the variables of a rank."""
    file = tmp_path / "show.py"
    file.write_text(SHOW)
    return file


def check_ranks(output, counts):
    """Assert that each node has so many ranks, numbered in a row. Return their variables."""
    ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    ranks.sort(key=lambda rank: int(rank["RANK"]))
    total = sum(counts)
    assert [rank["RANK"] for rank in ranks] == [str(number) for number in range(total)], output
    assert {rank["WORLD_SIZE"] for rank in ranks} == {str(total)}
    nodes = [[*group] for _, group in groupby(ranks, lambda rank: rank["HOST"])]
    assert [len(node) for node in nodes] == counts
    for node in nodes:
        assert [rank["LOCAL_RANK"] for rank in node] == [str(number) for number in range(len(node))]
        assert {rank["LOCAL_WORLD_SIZE"] for rank in node} == {str(len(node))}
    each = counts[:1] if len({*counts}) == 1 else counts
    assert f"ranks on each: {' '.join(map(str, each))}, in all: {total}\n" in output
    return ranks


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("-N 2 --ntasks-per-node 3", [3, 3]),
        ("-N 2 -n 5 --exclusive", [3, 2]),
        ("-N 2 --gpus-per-node 4", [4, 4]),  # nobody asked for tasks
        ("-N 2 --ntasks-per-node 2 --gpus-per-task 1", [2, 2]),
        pytest.param("-N 2", [1, 1], marks=pytest.mark.full),
        pytest.param("-n 3", [3], marks=pytest.mark.full),
        pytest.param("-N 2 --gpus 8 --ntasks-per-gpu 1", [4, 4], marks=pytest.mark.full),
        pytest.param(
            "-N 2 --ntasks-per-node 2 --distribution cyclic", [2, 2], marks=pytest.mark.full
        ),
    ],
)
def test_as_many_ranks_as_tasks_else_as_gpus_else_as_nodes(options, counts, slurm, show, tmp_path):
    done = slurm.run("salloc", *options.split(), LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_ranks(done.stdout, counts)


@pytest.mark.full
@pytest.mark.parametrize(
    "planted",
    [
        "SRUN_CPUS_PER_TASK=32",
        "SLURM_TRES_PER_TASK=cpu:32",
        "SLURM_HINT=nomultithread",
        "SLURM_EXPORT_ENV=NONE",
    ],
)
def test_what_a_site_puts_into_the_environment_does_not_disturb(planted, slurm, show, tmp_path):
    allocation = ("salloc", "-N", 2, "--ntasks-per-node", 2, "-c", 4)
    done = slurm.run(*allocation, "env", planted, LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\neach rank: 4 CPUs, " in done.stdout
    check_ranks(done.stdout, [2, 2])


def test_a_port_and_an_address_of_the_user_are_used(slurm, show, tmp_path):
    settings = ("env", "MASTER_PORT=29555", "MASTER_ADDR=10.77.0.1")
    done = slurm.run("salloc", "-N", 2, *settings, LAUNCHER, show, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nmeeting point: 10.77.0.1:29555, interface eth0\n" in done.stdout
    for rank in check_ranks(done.stdout, [1, 1]):
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("10.77.0.1", "29555")


def test_torchrun_on_unequal_nodes_and_a_slow_link(slurm, tmp_path):
    """Lesson 9 says where its ranks are, and sees how fast the link between the nodes is."""
    allocation = ("salloc", "-N", 2, "-n", 3, "--exclusive")
    assert slurm.call("link", "800mbit").returncode == 0
    try:
        done = slurm.run(*allocation, LAUNCHER, "--torchrun", "9", cwd=tmp_path)
    finally:
        assert slurm.call("link", "off").returncode == 0
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == [(0, "node1", 0), (1, "node1", 1), (2, "node2", 0)]
    assert proof_of(done.stdout).startswith("=> 2 nodes, 3 ranks: every rank holds 3; ")
    assert proves(done.stdout)
    row = r"{}, 2 ranks, 64 MB: .*?([\d,.]+) MB/s"
    within, between = (
        float(re.search(row.format(where), done.stdout)[1].replace(",", ""))
        for where in ("within a node", "between nodes")
    )
    assert between < 100 < within  # 800 Mbit/s are 100 MB/s


def test_torchrun_wants_all_gpus_of_a_node(slurm, tmp_path):
    allocation = ("salloc", "--quiet", "-N", 2, "-n", 4, "--gpus-per-task", 1)
    done = slurm.run(*allocation, LAUNCHER, "--torchrun", "9", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--gpus-per-node instead" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("-N 1 --gpus-per-node 4 -c 8", [4]),
        ("-N 2 --ntasks-per-node 2 -c 2", [2, 2]),
    ],
)
def test_in_a_shell_of_srun_the_launcher_is_no_rank(options, counts, slurm, show, tmp_path):
    need("script")
    shell = ("script", "-qec", f"srun {options} --pty bash --norc", "/dev/null")
    launcher, python = shlex.quote(str(LAUNCHER)), shlex.quote(sys.executable)
    typed = f"PYTHON={python} {launcher} show.py >said.txt 2>&1\nexit\n"
    done = slurm.run(*shell, input=typed, cwd=tmp_path)
    assert (tmp_path / "said.txt").exists(), done.stdout
    check_ranks((tmp_path / "said.txt").read_text(), counts)


def test_the_doctor_looks_at_the_allocation(slurm, tmp_path):
    doctor = ROOT / "scripts" / "doctor.sh"
    done = slurm.run("salloc", "-N", 2, "-n", 3, "--exclusive", doctor, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("nodes: node1 node2, ranks on each: 2 1, in all: 3\n")
    assert "FAIL" not in done.stdout


@pytest.mark.parametrize("wish", ["--constraint=none", "--gpus-per-node=5"])
def test_what_no_node_has_is_refused(wish, slurm, tmp_path):
    done = slurm.run("salloc", "--nodes", 2, wish, "true", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"Invalid feature spec|node configuration is not available", done.stderr)


# Each lesson of Day 2, on two nodes. Lessons 9 and 10 are above.

SHORT = {
    "11": ["--file", "data/mnist.h5", "--max-steps", 20],
    "12": ["--images", 2000, "--epochs", 1, "--save-every", 10, "--crash-at-step", 15],
    "13": ["--max-steps", 10],
    "14": ["--folder", "data/ratings", "--epochs", 1],
    "16": ["--max-steps", 12, "--batch-size", 16],
    "17": ["--max-steps", 12],
    "18": ["--steps", 6, "--batch-size", 32],
}
MADE_BY = {
    "11": ["create_mnist_h5", "--file", "data/mnist.h5"],
    "14": ["create_ratings", "--folder", "data/ratings", "--copies", "1", "--files", "8"],
}


@pytest.mark.full
@pytest.mark.parametrize(
    "lesson_id",
    [name for name, lesson in LESSONS.items() if "nodes" in lesson and name not in ("9", "10")],
)
def test_each_lesson_runs_on_nodes(lesson_id, slurm, tmp_path):
    if lesson_id in MADE_BY:
        name, *arguments = MADE_BY[lesson_id]
        (tmp_path / "data").mkdir()
        command = [sys.executable, ROOT / LESSONS[name]["file"], *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    command = (LAUNCHER, *LESSONS[lesson_id].get("launcher", []), lesson_id)
    few = SHORT.get(lesson_id, [])
    done = slurm.run("salloc", "--nodes", 2, *command, *few, cwd=tmp_path, timeout=200)
    if done.returncode == 69:
        cannot(done.stdout.splitlines()[-1])
    # So few steps may be too few for a lesson's claim. That it is reached at all is asked here.
    assert proof_of(done.stdout), done.stdout + done.stderr
    assert done.returncode == (0 if proves(done.stdout) else 1)
    assert "nodes: node1 node2, ranks on each: 1, in all: 2\n" in done.stdout


# Batch jobs.


class BatchJob:
    """A batch job on a cluster, and its log."""

    def __init__(self, cluster, *command, cwd, log="logs/slurm-{}.out"):
        self.cluster, self.cwd = cluster, cwd
        # As somebody submits whose environment is active.
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        done = self.run("env", path, "sbatch", "--parsable", *command)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()
        self.file = cwd / log.format(self.number)

    def run(self, *command):
        return self.cluster.run(*command, cwd=self.cwd)

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def wait_for(self, text, seconds=150):
        assert wait_for(lambda: re.search(text, self.log(), re.M), seconds), self.log()

    def wait(self):
        """Wait for the job's end; return its state."""
        going = r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)"
        show = ("scontrol", "show", "job", self.number)
        assert wait_for(lambda: not re.search(going, self.run(*show).stdout), 150), self.log()
        return re.search(r"JobState=(\w+)", self.run(*show).stdout)[1]


def test_the_lines_of_the_script_as_they_are(slurm, show, tmp_path):
    """From a folder that is not the course's. The log names each step."""
    need("vmstat")
    folder = tmp_path / "with space"
    folder.mkdir()
    job = BatchJob(slurm, SCRIPT, show, "a b", cwd=folder)
    assert job.wait() == "COMPLETED", job.log()
    steps = re.findall(r"^== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)$", job.log(), re.M)
    assert steps[0] == f"job {job.number}, start 1, nodes node[1-2]"
    assert steps[1].startswith("environment: ")
    assert steps[2] == f"start: multinode_setup_and_run.sh --monitor {show} a b"
    assert steps[3:] == ["the job ends with exit status 0"]
    assert "\neach rank: 32 CPUs, " in job.log()
    check_ranks(job.log(), [4, 4])
    monitors = [file.name.partition("-node")[2] for file in folder.glob("logs/cpu-*.out")]
    assert sorted(monitors) == ["1.out", "2.out"]


@pytest.mark.full
def test_first_the_doctor_then_lesson_9(slurm, tmp_path):
    job = BatchJob(slurm, "--ntasks-per-node", 1, SCRIPT, "--doctor", cwd=tmp_path)
    assert job.wait() == "COMPLETED", job.log()
    assert job.log().count("nodes: node1 node2, ranks on each: 1, in all: 2\n") == 2
    doctor, start = job.log().index(" doctor\n"), job.log().index(" --monitor 9\n")
    assert doctor < start
    assert proves(job.log())


def test_a_copy_of_the_script_in_the_course_and_elsewhere(slurm, tmp_path):
    """The job of a rank that fails ends with the rank's exit status, and does not start again."""
    scripts = tmp_path / "my course" / "scripts"
    copy_tree(ROOT / "scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / SCRIPT.name).rename(scripts / "my job.sh")
    (tmp_path / "fails.py").write_text('import os, sys\nsys.exit(3 * int(os.environ["RANK"]))\n')
    few = ("-N", 1, "--ntasks-per-node", 2)
    job = BatchJob(slurm, *few, scripts / "my job.sh", "fails.py", "a b", cwd=tmp_path)
    assert job.wait() == "FAILED"
    assert "The first to fail: rank 1 on node1 ended with exit status 3.\n" in job.log()
    assert job.log().endswith(" the job ends with exit status 3\n")
    shutil.copy(SCRIPT, tmp_path)
    job = BatchJob(slurm, tmp_path / SCRIPT.name, cwd=tmp_path)
    assert job.wait() == "FAILED"
    assert "sbatch_run.sh is not in the folder scripts of the course: submit it" in job.log()


def test_outside_a_job_the_script_says_how_it_is_used():
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Usage: sbatch " in done.stdout


def test_the_course_runs_as_a_batch_job(slurm, tmp_path):
    script = ROOT / "scripts" / "run_course.sh"
    job = BatchJob(slurm, "-o", "slurm-%j.out", script, "0", cwd=tmp_path, log="slurm-{}.out")
    assert job.wait() == "COMPLETED", job.log()
    assert "1 of 1 lessons ok" in job.log()


# Lesson 12, with a snapshot about every second, and long enough to be stopped in between.
LESSON_12 = ("12", "--images", 3198, "--batch-size", 32, "--save-every", 10, "--epochs", 6)


def assert_resumed(job):
    """Assert that one log tells of two starts, and that lesson 12 has the parameters of one."""
    assert job.wait() == "COMPLETED", job.log()
    first, second = re.split(r"^== .*, start 2, nodes .*\n", job.log(), flags=re.M)
    assert re.search(r"^step \d+: snapshot in epoch ", first, re.M)
    assert "=> " not in first
    assert re.search(r"^start 2: goes on in epoch \d after [\d,]+ images$", second, re.M)
    assert proof_of(second).startswith("=> starts: 2, images once an epoch: 3,198 of 3,198 ")
    assert proof_of(second).endswith(", parameters as without a stop: ok")
    assert second.endswith(" the job ends with exit status 0\n")


def test_warned_a_job_saves_goes_back_into_the_queue_and_resumes(slurm, tmp_path):
    job = BatchJob(slurm, "--ntasks-per-node", 1, SCRIPT, *LESSON_12, cwd=tmp_path)
    job.wait_for(": snapshot ")
    # What Slurm does before the time limit: the next test waits for one.
    job.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(" the lesson has saved its state and stopped: back into the queue$")
    assert "\nStopped as told. " in job.log()
    job.wait_for(", start 2, nodes ")
    assert_resumed(job)


# Waits for a minute, or for a signal, and says so.
WAITS = """
import os, signal, time
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
rank = os.environ["RANK"]
os.write(1, f"rank {rank} is ready\\n".encode())
for _ in range(1200):
    if told:
        break
    time.sleep(0.1)
os.write(1, f"rank {rank} was signaled {len(told)} times\\n".encode())
"""


@pytest.mark.full
@pytest.mark.parametrize("how", [[], ["--torchrun"]])
def test_a_real_time_limit_where_slurms_own_signal_does_not_reach_the_ranks(
    how, tmp_path, monkeypatch
):
    """On a cluster that tracks processes with control groups, as most do."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not freezer.exists():
        cannot("needs control groups of version 1")
    monkeypatch.setenv("LOCAL_SLURM_SETTINGS", "ProctrackType=proctrack/cgroup")
    (tmp_path / "waits.py").write_text(WAITS)
    cluster = bring_up(2, f"/run/local-slurm-cgroup-{os.getpid()}")
    try:
        job = BatchJob(cluster, "--time", 1, SCRIPT, *how, "waits.py", cwd=tmp_path)
        assert job.wait() == "COMPLETED", job.log()
    finally:
        cluster.call("down")
        for folder in sorted(freezer.glob("slurm_node*/**/"), reverse=True):
            folder.rmdir()
    assert " the time limit is near: warn the ranks\n" in job.log()
    said = sorted(line for line in job.log().splitlines() if "signaled" in line)
    assert said == [f"rank {rank} was signaled 1 times" for rank in range(8)]
    assert "back into the queue" not in job.log()  # no rank has said that its state is saved


@pytest.mark.full
@pytest.mark.parametrize(("notices", "how"), [("Slurm", []), ("the job", ["--torchrun"])])
def test_a_job_that_has_lost_a_node_resumes_with_another(notices, how, tmp_path, monkeypatch):
    if notices == "the job":  # on most clusters Slurm waits for 5 minutes
        monkeypatch.setenv("LOCAL_SLURM_SETTINGS", "SlurmdTimeout=60")
    folder = Path(f"/run/local-slurm-lost-{os.getpid()}")
    cluster = bring_up(3, folder)
    try:
        job = BatchJob(cluster, "--ntasks-per-node", 1, SCRIPT, *how, *LESSON_12, cwd=tmp_path)
        job.wait_for(": snapshot ")
        os.kill(int((folder / "node2.pid").read_text()), 9)
        if notices == "the job":
            job.wait_for(" srun does not reach all nodes: wait until Slurm notices, and starts the")
        job.wait_for(", start 2, nodes ")
        assert_resumed(job)
    finally:
        cluster.call("down")
    assert ", start 1, nodes node[1-2]\n" in job.log()
    assert ", start 2, nodes node[1,3]\n" in job.log()


# The two scripts on the page day2/BATCH.md.


def script_of_the_page(word):
    """Return the script that holds a word."""
    page = (ROOT / "day2" / "BATCH.md").read_text()
    scripts = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    return next(script for script in scripts if word in script)


# In the place of a user's train.py: waits for the signal at the first start, ends at the second.
TRAIN = """
import os, signal, time
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
start, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURM_PROCID"]
os.write(1, f"restarts: {start}, rank {rank}\\n".encode())
while start == "0" and not told:
    time.sleep(0.1)
if told and rank == "0":
    open("stopped", "w").close()
"""


@pytest.mark.full
def test_the_job_script_of_the_page_resumes(slurm, tmp_path):
    """Here Slurm's own signal, without B:, reaches Python."""
    (tmp_path / "job.sh").write_text(script_of_the_page("train.py"))
    (tmp_path / "train.py").write_text(TRAIN)
    job = BatchJob(slurm, "job.sh", cwd=tmp_path, log="slurm-{}.out")
    job.wait_for(r"(restarts: 0, rank \d\n){8}")
    job.run("scancel", "--signal=USR1", job.number)
    job.wait_for(r"(restarts: 1, rank \d\n){8}")
    assert job.wait() == "COMPLETED"
    assert not (tmp_path / "stopped").exists()


@pytest.mark.full
def test_the_job_array_of_the_page_runs_lesson_8_with_several_rates(slurm, tmp_path):
    (tmp_path / "sweep.sh").write_text(script_of_the_page("--array"))
    (tmp_path / "day1").symlink_to(ROOT / "day1")
    job = BatchJob(slurm, "--array=1,3", "sweep.sh", 2, "--images", 320, cwd=tmp_path)
    assert wait_for(lambda: not slurm.run("squeue", "--noheader", cwd=tmp_path).stdout, 200)
    for number, rate in ((1, "0.00125"), (3, "0.005")):
        log = (tmp_path / f"slurm-{job.number}_{number}.out").read_text()
        assert f"alone: global batch 8, learning rate {rate}, mean loss " in log
        assert proof_of(log).startswith("=> gap to the loss curve of one process: ")
        assert (tmp_path / "runs" / "sweep" / f"lr-{rate}" / "runs").is_dir()


# The cluster on this machine.


@pytest.mark.parametrize("mode", ["full", "loopback"])
def test_a_second_cluster_beside_the_first_leaves_nothing_behind(
    mode, slurm, tmp_path, monkeypatch
):
    need("ps", "ip")
    folder = f"/run/local-slurm-second-{os.getpid()}"

    def traces():
        commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
        mounts = Path("/proc/self/mounts").read_text()
        return folder in commands, folder in mounts, links, os.path.exists(folder)

    before = traces()
    monkeypatch.setenv("LOCAL_SLURM_MODE", mode)
    cluster = bring_up(2, folder)
    try:
        show = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
        step = ("srun", "--nodes", 2, "--gpus-per-node", 3, "sh", "-c", show)
        done = cluster.run(*step, cwd=tmp_path)
        assert sorted(done.stdout.splitlines()) == ["node1 0,1,2", "node2 0,1,2"], done.stderr
        cluster.run("sbatch", "--wrap", "sleep 1000", cwd=tmp_path)
        assert cluster.call("up").returncode == 1  # there is one already
    finally:
        assert cluster.call("down").returncode == 0
    assert traces() == before
    assert cluster.call("status").returncode == 1
    assert slurm.call("status").returncode == 0
    assert cluster.call("down").returncode == 0  # nothing to do is no fault
