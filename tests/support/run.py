"""What the tests share: the list of lessons, and running one as a user does."""

import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import processes
import psutil
import pytest
import records
from catalog import ROOT, load, read_lessons
from loss_curves import losses as losses  # for the tests
from PIL import Image

LAUNCHER = ROOT / "scripts" / "multinode_setup_and_run.sh"
LESSONS = {lesson["id"]: lesson for lesson in read_lessons()}
# A rank alone, so that no launcher is needed.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
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
# A child in another session ignores SIGTERM and keeps stdout open. Its parent goes on with what
# follows.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a program started now ignores it, too
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.write(1, f"started {child.pid}\\n".encode())
"""
FAST = {"grace": 1, "settle": 1}  # seconds
# What a program begins with that uses the packages of scripts/.
IMPORT = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"


def run(command, timeout, cwd, env):
    """Run a command to its end; return (exit status, stdout and stderr). It must leave nothing."""
    environment = {**os.environ, **(env or {})}
    job = processes.run(command, timeout, cwd=cwd, env=environment, stderr=subprocess.STDOUT)
    assert not job.stopped, f"{job.trouble}:\n{job.output}"
    assert job.left == [], job.output
    return job.status, job.output


def output_of(result, expected=0):
    """Return the output of (exit status, output), if it has ended as expected."""
    status, output = result
    assert status == expected, output
    return output


def load_lesson(lesson_id):
    return load(LESSONS[lesson_id]["file"])


@contextlib.contextmanager
def server(*command, cwd):
    """Start a command that serves a page on this machine. Yield the address; then comes Ctrl-C."""
    with processes.Job(command, 200, cwd=cwd, stderr=subprocess.STDOUT) as job:
        found = (re.search(r"http://127\.0\.0\.1:\d+/", line) for line in job.lines())
        address = next(filter(None, found), None)
        assert address, job.output
        yield address[0]
        job.end(signal.SIGINT)
        assert job.status != -signal.SIGKILL, "it does not end on Ctrl-C"


def launch(*arguments, cwd, env=None, timeout=200):
    """Run the launcher outside Slurm; return (exit status, output). It must leave nothing."""
    status, output = run([LAUNCHER, *arguments], timeout, cwd, env)
    assert "Left behind by a rank" not in output, output
    return status, output


def cached_across_workers(tmp_path_factory, name, function):
    """Return function(), called by one of the test processes only."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = folder / f"{name}.json"
        if not result.exists():
            result.write_text(json.dumps(function()))
        return json.loads(result.read_text())


def wait_for(condition, seconds):
    """Wait until condition() is true; return whether it became so in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def proof_of(output):
    """Return the line that begins with =>, or an empty string."""
    lines = [line for line in output.splitlines() if line.startswith("=>")]
    return lines[-1] if lines else ""


def proves(output):
    """Return whether the last proof line says that the lesson's claim holds."""
    return proof_of(output).endswith(": ok")


def same_losses(mine, theirs):
    """Return whether two curves, [loss, ...], are the same up to rounding.

    Each kind of CPU rounds in its own way. Once a difference has switched a ReLU it grows: on one
    kind from 1e-7 to 7e-5 within the steps 13 to 20.
    """
    begin = mine[:5] == pytest.approx(theirs[:5], abs=1e-5)
    return begin and mine == pytest.approx(theirs, abs=2e-3)


def skip_or_fail_in_ci(reason):
    """Skip, but not in continuous integration: there everything must be at hand."""
    (pytest.fail if "CI" in os.environ else pytest.skip)(reason)


def copy_tree(source, target, **options):
    """Copy a folder with shutil.copytree. Of a read-only folder, the copy can be written to."""
    shutil.copytree(source, target, **options)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)


def works(*command):
    """Return whether a command is there and succeeds."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def require_programs(*programs):
    for program in programs:
        if shutil.which(program) is None:
            skip_or_fail_in_ci(f"needs {program}")


def require_browser(*fonts):
    """Skip where there is no browser, or no font, or not these fonts. Return the browser."""
    browser = os.environ.get("CHROME_PATH", "chromium")
    require_programs(browser, "fc-list")
    for font in fonts or (":",):  # a colon: any font
        if not works("fc-list", "--quiet", font):
            skip_or_fail_in_ci(
                f"needs the font {font}" if fonts else "needs a font for the browser"
            )
    return browser


def full(*values):
    """Return values of a parametrized test that only the full suite runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def seeded_rng():
    """Return a random.Random that makes the same choices in every run."""
    return random.Random(7)


def open_in_browser(url, folder, *options):
    """Open a page in a real browser without a window. Return its DOM.

    folder is for the browser's own files; the options are chromium's, such as --screenshot=FILE.
    """
    browser = require_browser()
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=5000", *options]
    command += ["--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def write_pictures(folder, counts, colours):
    """Write small pictures as ImageFolder reads them: so many of each class in each part."""
    for part, name in itertools.product(counts, colours):
        (folder / part / name).mkdir(parents=True)
        for number in range(counts[part]):
            picture = Image.new("RGB", (70 + number, 80), colours[name])
            picture.save(folder / part / name / f"{number}.png")


def recorded_output(lesson_id):
    """Return what a lesson printed when it was last recorded, as its page shows it."""
    return "\n".join(records.read_records()[records.SHOWN][lesson_id]["output"])


def wait_without_trouble(job):
    """Wait for a job, which must not reach its limit, and leave nothing."""
    job.wait()
    assert not job.stopped, job.output + job.errors
    assert job.left == []


def rank_of(job, number):
    """Return the process id of a rank of a job. The data workers that it forks are newer."""
    for process in map(psutil.Process, sorted(job.processes())):
        name = process.name()  # of a forked rank: rank 1
        if name.startswith(("python", "pt_")):
            name = f"rank {process.environ().get('RANK')}"
        if name == f"rank {number}":
            return process.pid


def is_alive(pid):
    """Return whether a process runs, and is no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
