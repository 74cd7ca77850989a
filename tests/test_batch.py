"""Batch jobs on a real Slurm: scripts/sbatch_run.sh, and the job array of scripts/sweep.sh."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import bring_up
from helpers import LAUNCHER, LESSONS, ROOT, cannot, copy_tree, proof_of, proves, wait_for

SCRIPT = ROOT / "scripts" / "sbatch_run.sh"
SWEEP = ROOT / "scripts" / "sweep.sh"
COLLECT = ROOT / "scripts" / "collect_sweep.py"
# Lesson 12, with a snapshot about every second, and long enough to be stopped in between.
LESSON_12 = ("12", "--images", 3198, "--batch-size", 32, "--save-every", 10, "--epochs", 6)
# Waits for a minute, or for a signal, and says so.
WAITS = """
import os, signal, time
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
rank = os.environ["RANK"]
os.write(1, f"rank {rank} is ready\\n".encode())
for _ in range(600):
    if told:
        break
    time.sleep(0.1)
os.write(1, f"rank {rank} was signaled {len(told)} times\\n".encode())
"""


class BatchJob:
    """A batch job with its log in logs/, on a cluster as bring_up returns it."""

    def __init__(self, cluster, *command, cwd):
        self.cluster, self.cwd = cluster, cwd
        # As somebody submits whose environment is active.
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        done = self.run("env", path, "sbatch", "--parsable", *command)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()
        self.file = cwd / "logs" / f"slurm-{self.number}.out"

    def run(self, *command):
        return self.cluster.run(*command, cwd=self.cwd)

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def wait_for(self, text, seconds=100):
        assert wait_for(lambda: re.search(text, self.log(), re.M), seconds), self.log()

    def state(self):
        done = self.run("scontrol", "show", "job", self.number)
        return re.search(r"JobState=(\w+)", done.stdout)[1]

    def start_again(self, says):
        """Wait until Slurm starts the job again: on the local cluster after some 10 s."""
        assert wait_for(lambda: re.search(says, self.log()), 150), self.log()

    def wait(self):
        """Wait for the job's end; return its state."""
        states = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        seen = []

        def ended():
            seen.append(self.state())
            return seen[-1] not in states

        assert wait_for(ended, 150), self.log()
        return seen[-1]


def assert_went_on(job, starts=2):
    """Assert that one log tells of all starts, and lesson 12 has the parameters of one start."""
    assert job.wait() == "COMPLETED", job.log()
    parts = re.split(r"^== .*, start (\d), nodes .*\n", job.log(), flags=re.M)
    assert parts[1::2] == [str(start) for start in range(1, starts + 1)]
    *stopped, last = parts[2::2]
    assert all(re.search(r"^step \d+: snapshot in epoch ", part, re.M) for part in stopped)
    assert not any("=> " in part for part in stopped)
    assert re.search(rf"^start {starts}: goes on in epoch \d after [\d,]+ images$", last, re.M)
    once = "images once an epoch: 3,198 of 3,198 (limit 3,192)"
    assert proof_of(last).startswith(f"=> starts: {starts}, {once}, ")
    assert proves(last)
    assert last.endswith(" the job ends with exit status 0\n")


def test_as_it_is_the_script_runs_a_lesson_and_its_log_names_each_step(slurm, tmp_path):
    """The lines #SBATCH as they are, from a folder that is not the course's."""
    folder = tmp_path / "with space"
    folder.mkdir()
    job = BatchJob(slurm, SCRIPT, "--doctor", cwd=folder)
    assert job.wait() == "COMPLETED", job.log()
    steps = re.findall(r"^== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)$", job.log(), re.M)
    patterns = [
        rf"job {job.number}, start 1, nodes node\[1-2\]",
        r"environment: .*python3",
        "doctor",
        r"start: multinode_setup_and_run\.sh --monitor 9",
        "the job ends with exit status 0",
    ]
    assert len(steps) == len(patterns), steps
    for step, pattern in zip(steps, patterns, strict=True):
        assert re.fullmatch(pattern, step), step
    assert " checks ok, 8 ranks\n" in job.log()
    assert job.log().count("nodes: node1 node2, ranks on each: 4, in all: 8\n") == 2
    assert job.log().count("each rank: 32 CPUs, ") == 2
    assert proves(job.log())
    assert len([*folder.glob(f"logs/cpu-{job.number}.*-node?.out")]) == 2


@pytest.fixture
def course(tmp_path):
    """A copy of the scripts, and in it the batch script under another name."""
    folder = tmp_path / "my course" / "scripts"
    copy_tree(ROOT / "scripts", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / SCRIPT.name).rename(folder / "my job.sh")
    return folder.parent


def test_a_copy_under_another_name_finds_the_launcher(slurm, course, tmp_path):
    (course / "fails.py").write_text('import os, sys\nsys.exit(3 * int(os.environ["RANK"]))\n')
    options = ("-N", 1, "--ntasks-per-node", 2)
    job = BatchJob(slurm, *options, course / "scripts" / "my job.sh", "fails.py", "a b", cwd=course)
    assert job.wait() == "FAILED"
    assert "The first to fail: rank 1 on node1 ended with exit status 3.\n" in job.log()
    assert job.log().endswith(" the job ends with exit status 3\n")  # and it does not start again
    shutil.copy(SCRIPT, tmp_path)
    job = BatchJob(slurm, tmp_path / SCRIPT.name, cwd=tmp_path)
    assert job.wait() == "FAILED"
    assert "sbatch_run.sh is not in the folder scripts of the course: submit it" in job.log()


def test_the_course_runs_as_a_batch_job(slurm, course, tmp_path):
    """Slurm's copy of the script is in another folder. The course's has a space in its name."""
    script = course / "scripts" / "run_course.sh"
    shutil.copy(ROOT / "requirements.txt", course)
    log = tmp_path / "job.out"
    options = ("--wait", "--nodes", "1", "--output", str(log))
    done = slurm.run("sbatch", *options, str(script), "--list", cwd=tmp_path)
    assert done.returncode == 0, log.read_text()
    assert "day1/0_torch_dist.py" in log.read_text()


def test_outside_a_job_the_script_says_how_it_is_used():
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Usage: sbatch " in done.stdout
    assert subprocess.run([SCRIPT, "--help"], capture_output=True).returncode == 0


@pytest.mark.parametrize("how", [[], ["--torchrun"]])
def test_warned_and_then_put_back_into_the_queue_a_job_goes_on(how, slurm, tmp_path):
    job = BatchJob(slurm, "--ntasks-per-node", 1, SCRIPT, *how, *LESSON_12, cwd=tmp_path)
    job.wait_for(": snapshot ")
    # What Slurm does before the time limit: the next test waits for one.
    job.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(" the lesson has saved its state and stopped: back into the queue$")
    assert "\nStopped as told. " in job.log()
    job.start_again(", start 2, nodes ")
    job.wait_for(r", start 2, nodes (?s:.*): snapshot ")
    assert job.run("scontrol", "requeue", job.number).returncode == 0
    job.start_again(", start 3, nodes ")
    assert_went_on(job, starts=3)


def test_where_slurms_own_signal_does_not_reach_the_ranks_the_script_passes_it_on(
    tmp_path, monkeypatch
):
    """A real time limit, on a cluster that tracks processes with control groups, as most do."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not freezer.exists():
        cannot("needs control groups of version 1")
    monkeypatch.setenv("LOCAL_SLURM_SETTINGS", "ProctrackType=proctrack/cgroup")
    (tmp_path / "waits.py").write_text(WAITS)
    cluster = bring_up(2, f"/run/local-slurm-cgroup-{os.getpid()}")
    own = ("sbatch", "--time", 1, "--signal=USR1@60", "-N", 2, "--output", "own.out")
    try:
        cluster.run(*own, "--wrap", shlex.join([str(LAUNCHER), "waits.py"]), cwd=tmp_path)
        job = BatchJob(cluster, "--time", 1, SCRIPT, "--torchrun", "waits.py", cwd=tmp_path)
        assert job.wait() == "COMPLETED", job.log()
        # The other began earlier, and was warned no later.
    finally:
        cluster.call("down")
        for folder in sorted(freezer.glob("slurm_node*/**/"), reverse=True):
            folder.rmdir()
    assert " the time limit is near: warn the ranks\n" in job.log()
    said = sorted(line for line in job.log().splitlines() if "signaled" in line)
    assert said == [f"rank {rank} was signaled 1 times" for rank in range(8)]
    assert "back into the queue" not in job.log()  # no rank has said that its state is saved
    output = (tmp_path / "own.out").read_text()
    assert sorted(re.findall(r"rank \d is ready", output)) == ["rank 0 is ready", "rank 1 is ready"]
    assert "signaled 1 times" not in output


# In the place of a user's train.py: waits for the signal at the first start, ends at the second.
TRAIN = """
import os, signal, sys, time
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
start, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURM_PROCID"]
os.write(1, f"restarts: {start}, rank {rank}\\n".encode())
while start == "0" and not told:
    time.sleep(0.1)
if told and rank == "0":
    open("stopped", "w").close()
"""


def test_the_job_script_of_the_page_goes_on(slurm, tmp_path):
    """That of the section In your own job, with what Slurm does without B: when time is short."""
    text = (ROOT / "day2" / "BATCH.md").read_text()
    (script,) = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "logs").mkdir()
    job = BatchJob(slurm, "--output", "logs/slurm-%j.out", "job.sh", cwd=tmp_path)
    job.wait_for(r"(restarts: 0, rank \d\n){8}")
    job.run("scancel", "--signal=USR1", job.number)
    job.start_again(r"(restarts: 1, rank \d\n){8}")
    assert job.wait() == "COMPLETED"
    starts = re.findall(r"^restarts: (\d), rank \d$", job.log(), re.M)
    assert starts == ["0"] * 8 + ["1"] * 8, job.log()
    assert not (tmp_path / "stopped").exists()


@pytest.mark.parametrize(("notices", "how"), [("Slurm", []), ("the job", ["--torchrun"])])
def test_a_job_that_has_lost_a_node_goes_on_with_another(notices, how, tmp_path, monkeypatch):
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
        job.start_again(", start 2, nodes ")
        assert_went_on(job)
    finally:
        cluster.call("down")
    assert ", start 1, nodes node[1-2]\n" in job.log()
    assert ", start 2, nodes node[1,3]\n" in job.log()


# The job array.

ROWS = re.compile(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| .*% \|$", re.M)


def collect(folder):
    """Run the command that collects; return what subprocess.run does."""
    command = [sys.executable, COLLECT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


# In the place of python: the first and the last rate get the real lesson 8, the others its rows.
FIRST_AND_LAST = """#!/bin/sh
case $3 in FIRST | LAST) exec "PYTHON" "$@" ;; esac
echo "alone: global batch 8, learning rate $3, mean loss 0.5, test accuracy 90.00%"
echo "unscaled: global batch 16, learning rate $3, mean loss 0.75, test accuracy 80.00%"
echo "linear: global batch 16, learning rate 1, mean loss 0.625, test accuracy 85.00%"
echo "=> gap to the loss curve of one process: 50% unscaled, 25% linear (limit 45%): ok"
"""


def test_a_sweep_is_a_job_array_of_two_runs_at_a_time(slurm, tmp_path):
    rates = re.search(r"^rates=\((.*)\)$", SWEEP.read_text(), re.M)[1].split()
    text = FIRST_AND_LAST.replace("FIRST", rates[0]).replace("LAST", rates[-1])
    (tmp_path / "python").write_text(text.replace("PYTHON", sys.executable))
    (tmp_path / "python").chmod(0o755)
    submit = ("env", f"PYTHON={tmp_path / 'python'}", "sbatch", "--parsable", SWEEP)
    done = slurm.run(*submit, 2, "--images", 320, cwd=tmp_path)
    array, running = done.stdout.strip(), []

    def ended():
        squeue = slurm.run("squeue", "--noheader", "--array", "--format=%t", cwd=tmp_path)
        states = squeue.stdout.split()
        running.append(states.count("R"))
        return not states

    assert wait_for(ended, 250)
    assert max(running) == 2
    logs = [tmp_path / "logs" / f"slurm-{array}_{number}.out" for number in range(len(rates))]
    for rate, log in zip(rates, logs, strict=True):
        output = tmp_path / "runs" / "sweep" / f"lr-{rate}" / "output.txt"
        assert log.read_text() == f"== learning rate {rate}\n{output.read_text()}"
        assert f"alone: global batch 8, learning rate {rate}, mean loss " in output.read_text()
        assert proves(output.read_text()), output.read_text()
    done = collect(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = ROWS.findall(done.stdout)
    assert [rate for rate, *_ in rows] == sorted(rates, key=float)
    for rate, *losses in rows:
        output = (tmp_path / "runs" / "sweep" / f"lr-{rate}" / "output.txt").read_text()
        assert losses == re.findall(r"mean loss ([\d.]+), test", output)
    assert (tmp_path / "runs" / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")


# In the place of python: prints as lesson 8 does, but fails with the rate 0.005.
LESSON_8 = """#!/bin/sh
test "$3" != 0.005 || exit 3
echo "alone: global batch 8, learning rate $3, mean loss 0.5, test accuracy 90.00%"
echo "linear: global batch 32, learning rate 1, mean loss nan, test accuracy 9.80%"
echo "=> gap to the loss curve of one process: nan% linear"
printf '%s\\n' "$@" >arguments
"""


def test_without_slurm_the_runs_go_on_one_after_the_other(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(LESSON_8)
    python.chmod(0o755)
    done = collect(tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "There is no run in runs/sweep that has ended. Start them: scripts/sweep.sh\n"
    )
    env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    env.pop("PYTHON", None)
    done = subprocess.run(
        [SWEEP, "2", "--epochs", "3"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 3  # that of the run that has failed, and the rest is not started
    begun = re.findall(r"^== learning rate (\S+)$", done.stdout, re.M)
    assert begun == ["0.000625", "0.00125", "0.0025", "0.005"]
    arguments = (tmp_path / "runs" / "sweep" / "lr-0.0025" / "arguments").read_text().splitlines()
    assert arguments[1:] == ["--lr", "0.0025", "2", "--epochs", "3"]
    assert Path(arguments[0]).samefile(ROOT / LESSONS["8"]["file"])
    done = collect(tmp_path)
    assert done.returncode == 0
    unfinished = "runs/sweep/lr-0.005/output.txt: this run has not ended, or has failed\n"
    assert done.stderr == unfinished
    rows = [f"| {rate} | 0.5 | nan | 90.00% | 9.80% | nan% |" for rate in begun[:3]]
    assert done.stdout.splitlines()[2:5] == rows
