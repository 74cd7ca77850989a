"""Batch jobs on a real Slurm: scripts/sbatch_run.sh, and the scripts on the page day2/BATCH.md."""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from support.run import ROOT, full, proof_of, wait_for
from support.slurm_cluster import bring_up

SCRIPT = ROOT / "scripts" / "sbatch_run.sh"


class BatchJob:
    def __init__(self, cluster, *command, cwd, log="logs/slurm-{}.out", inside=()):
        self.cluster, self.cwd = cluster, cwd
        # As somebody submits whose environment is active.
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        done = self.run(*inside, "env", path, "sbatch", "--parsable", *command)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()
        self.file = cwd / log.format(self.number)

    def run(self, *command):
        return self.cluster.run(*command, cwd=self.cwd)

    def log(self):
        return self.file.read_text() if self.file.exists() else ""

    def wait_for(self, text, times=1):
        found = re.compile(text, re.M)
        assert wait_for(lambda: len(found.findall(self.log())) >= times, 100), self.log()

    def wait(self):
        """Wait for the job's end; return its state."""
        for _ in range(150):
            time.sleep(1)
            show = self.run("scontrol", "show", "job", self.number)
            state = re.search(r"JobState=(\w+)", show.stdout)[1]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING"):
                return state
        pytest.fail(f"{state}:\n{self.log()}")


def test_the_lines_of_the_script_as_they_are(slurm, tmp_path):
    """From a folder that is not the course's. The log names each step."""
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "show.py").write_text('import os, sys\nos.write(1, f"{sys.argv[1:]}\\n".encode())\n')
    job = BatchJob(slurm, SCRIPT, "show.py", "a b", cwd=folder)
    assert job.wait() == "COMPLETED", job.log()
    steps = re.findall(r"^== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)$", job.log(), re.M)
    assert steps[0] == f"job {job.number}, start 1, nodes node[1-2]"
    assert steps[1].startswith("environment: ")
    assert steps[2] == "start: multinode_setup_and_run.sh show.py a b"
    assert steps[3:] == ["the job ends with exit status 0"]
    assert "\neach rank: 32 CPUs, " in job.log()
    assert job.log().count("['a b']\n") == 8


@pytest.mark.full
def test_as_shipped_the_doctor_looks_first_and_then_it_trains_lesson_13(slurm, tmp_path):
    job = BatchJob(slurm, "--ntasks-per-node", 1, SCRIPT, "--doctor", cwd=tmp_path)
    job.wait_for("^ranks: 2, device: cpu, backend: gloo$")
    job.run("scancel", job.number)
    doctor, _ = job.log().split(" start: multinode_setup_and_run.sh 13\n")
    assert "ok " in doctor.partition(" doctor\n")[2]
    assert job.wait() == "CANCELLED"


@pytest.mark.full
def test_srun_alone_trains_on_all_ranks(slurm, tmp_path):
    """Its ranks find out from Slurm who they are."""
    srun = ["srun", "--nodes", "2", "--ntasks-per-node", "2", "env", "OMP_NUM_THREADS=1"]
    lesson = [sys.executable, str(ROOT / "day2" / "13_train.py"), "--max-steps", "5"]
    done = slurm.run(*srun, *lesson, "--data", "random", "--workers", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 4, device: cpu, backend: gloo\n" in done.stdout
    assert proof_of(done.stdout).startswith("=> 500 of 500 tested, ")


def test_a_copy_of_the_script_in_the_course_and_elsewhere(slurm, tmp_path):
    """The job of a rank that fails ends with the rank's exit status, and does not start again."""
    scripts = shutil.copytree(ROOT / "scripts", tmp_path / "my course" / "scripts")
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


INSIDE = "salloc -N 1 --mem-per-cpu 100 --gpus 1 --threads-per-core 1 srun env "
INSIDE += "SLURM_GPUS_PER_TASK=4 SLURM_GRES=gpu:9 SLURM_LABELIO=1 SLURM_EXCLUSIVE=1"


def test_what_another_job_has_left_in_the_environment_is_not_passed_on(slurm, tmp_path):
    """Somebody calls sbatch from a shell in a job. srun would refuse each of these variables."""
    (tmp_path / "show.py").write_text('import os\nos.write(1, b"started\\n")\n')
    asked = ("--ntasks-per-node", 2, "--gpus-per-node", 2, "--mem", 500, SCRIPT, "show.py")
    job = BatchJob(slurm, *asked, cwd=tmp_path, inside=INSIDE.split())
    assert job.wait() == "COMPLETED", job.log()
    assert job.log().count("started\n") == 4


def test_an_srun_that_is_refused_ends_the_job_with_its_own_words(slurm, tmp_path):
    """The job holds no nodes as if it had lost one."""
    job = BatchJob(slurm, SCRIPT, "9", cwd=tmp_path, inside=["env", "SLURM_TIMELIMIT=999999"])
    assert job.wait() == "FAILED", job.log()
    assert ": Requested time limit is invalid" in job.log()
    assert job.log().endswith(" the job ends with exit status 1\n")


# Lesson 12, with a snapshot about every second, and long enough to be stopped in between.
LESSON_12 = ("12", "--images", 3198, "--batch-size", 32, "--save-every", 10, "--epochs", 6)


def assert_resumed(job):
    """Assert that one log tells of two starts, and that lesson 12 has the parameters of one."""
    assert job.wait() == "COMPLETED", job.log()
    first, second = re.split(r"^== .*, start 2, nodes .*\n", job.log(), flags=re.M)
    assert "=> " not in first
    assert re.search(r"^start 2: resumes in epoch \d after [\d,]+ images$", second, re.M)
    assert proof_of(second).startswith("=> starts: 2, images once an epoch: 3,198 of 3,198 ")
    assert proof_of(second).endswith(", parameters as without a stop: ok")
    assert second.endswith(" the job ends with exit status 0\n")


@pytest.mark.parametrize("how", [[], full(["--torchrun"])], ids=["srun", "torchrun"])
def test_warned_a_job_saves_goes_back_into_the_queue_and_resumes(how, slurm, tmp_path):
    """Also if the warning comes while its ranks still import torch."""
    job = BatchJob(slurm, "--ntasks-per-node", 1, SCRIPT, *how, *LESSON_12, cwd=tmp_path)
    job.wait_for("^each rank: ")
    # What Slurm does before the time limit.
    job.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(" the lesson has saved its state and stopped: back into the queue$")
    assert "\nStopped as told. " in job.log()
    job.wait_for(", start 2, nodes ")
    assert_resumed(job)


@pytest.mark.full
@pytest.mark.parametrize(("notices", "how"), [("Slurm", []), ("the job", ["--torchrun"])])
def test_a_job_that_has_lost_a_node_resumes_with_another(notices, how, tmp_path, monkeypatch):
    if notices == "the job":  # on most clusters Slurm waits for 5 minutes
        monkeypatch.setenv("LOCAL_SLURM_SETTINGS", "SlurmdTimeout=60")
    with bring_up(3, "lost") as cluster:
        job = BatchJob(cluster, "--ntasks-per-node", 1, SCRIPT, *how, *LESSON_12, cwd=tmp_path)
        job.wait_for(": snapshot ")
        os.kill(cluster.pid("node2"), 9)
        if notices == "the job":
            job.wait_for(" a node does not answer: wait until Slurm notices, and starts the job")
        job.wait_for(", start 2, nodes ")
        assert_resumed(job)
    assert ", start 1, nodes node[1-2]\n" in job.log()
    assert ", start 2, nodes node[1,3]\n" in job.log()


# The two scripts on the page day2/BATCH.md.

# In the place of a user's training: waits for the signal at the first start, ends at the second.
WAITS = """
import os, signal, time
import torch.distributed as dist
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
start = os.environ.get("SLURM_RESTART_COUNT", "0")
rank = os.environ["RANK"]
dist.init_process_group("gloo")
os.write(1, f"restarts: {start}, rank {rank} of {dist.get_world_size()}\\n".encode())
while start == "0" and not told:
    time.sleep(0.1)
os._exit(75 if told else 0)
"""


@pytest.mark.full
def test_the_job_script_of_the_page_resumes(slurm, tmp_path):
    """Here Slurm's own signal, without B:, reaches Python."""
    page = (ROOT / "day2" / "BATCH.md").read_text()
    scripts = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    (script,) = [script for script in scripts if "train.py" in script]
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(WAITS)
    job = BatchJob(slurm, "job.sh", cwd=tmp_path, log="slurm-{}.out")
    job.wait_for("^restarts: 0, rank . of 8", times=8)
    job.run("scancel", "--signal=USR1", job.number)
    job.wait_for("^restarts: 1, rank . of 8", times=8)
    assert job.wait() == "COMPLETED"
