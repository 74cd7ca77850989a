"""Start lessons many times in a row and look for what fails, and for what is left behind.

Usage: python tests/soak.py [--starts N] [--only LESSON ...]

500 starts of lesson 0 and 200 of lesson 1 with 4 processes, 100 of lesson 9 on two imitated nodes
with 2 ranks each, and 50 of it on two nodes of a Slurm cluster, which is brought up for it where
that is possible. With --starts N, N of lesson 0 and the others in proportion; with --only, these
lessons only. Not part of the tests: on 2 cores it takes an hour. The exit status is 1 if a start
failed or left something.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from helpers import LAUNCHER, LESSONS, ROOT, proves
from launcher import processes

LIMIT = 300  # seconds for a start; one that takes longer hangs
# Memory that is somebody's. The rest caches files, and is given back when it is needed.
HELD = ("AnonPages", "Shmem", "SUnreclaim", "KernelStack", "PageTables")


def ports():
    """Return how many sockets listen in this machine's network."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    return sum(len(re.findall(r"^ *\d+: \S+ \S+ 0A ", table, re.M)) for table in tables)


def used():
    """Return {what: how much} of all that a start may leave, without its processes."""
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    names = os.listdir("/dev/shm")
    # Not PyTorch's one folder for what it compiles.
    files = os.listdir(tempfile.gettempdir())
    return {
        "listening ports": ports(),
        "semaphores": sum(name.startswith("sem.") for name in names),
        "shared memory": sum(not name.startswith("sem.") for name in names),
        "System V semaphores": len(Path("/proc/sysvipc/sem").read_text().splitlines()) - 1,
        "temporary files": sum(not name.startswith("torchinductor_") for name in files),
        "MB of memory": sum(int(memory[kind]) for kind in HELD) // 1024,
    }


def soak(name, command, lesson_id, starts, env):
    """Start a command many times; print failures and what has grown. Return whether all is well."""
    failures, left, seconds = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder, "tmp")
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        environment = {**os.environ, **env, "TMPDIR": str(temporary)}
        before = used()
        for number in range(1, starts + 1):
            job = processes.run(command, LIMIT, cwd=folder, env=environment, stderr=subprocess.PIPE)
            seconds.append(job.seconds)
            left += len(job.left)
            if job.trouble or not proves(job.output):
                failures += 1
                print(f"{name}, start {number} failed: {job.trouble}\n{job.output}{job.errors}")
                print(*job.left, sep="\n")
            if number % 10 == 0:
                print(f"{name}: {number} of {starts}, {failures} failed", flush=True)
        time.sleep(3)  # Python's own helpers notice a moment later that they are no longer needed
        after = used()
        tempfile.tempdir = None
    grown = {"processes": left} | {what: after[what] - before[what] for what in before}
    times = f"{sum(seconds) / len(seconds):.1f} s each, at most {max(seconds):.1f} s"
    print(f"=> {name}: {starts} starts, {failures} failed, {times}")
    print("   more than before: " + ", ".join(f"{more} {what}" for what, more in grown.items()))
    # Memory and ports belong to the whole machine, which may do other things too.
    own = ("semaphores", "System V semaphores", "temporary files")
    return not failures and not any(grown[what] > 0 for what in own)


def main():
    """Soak all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=500, help="of lesson 0 (500)")
    parser.add_argument("--only", nargs="+", choices=["0", "1", "9"], default=["0", "1", "9"])
    args = parser.parse_args()
    starts = args.starts
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    well = True
    for lesson_id, share in (("0", 1), ("1", 5 / 2)):
        if lesson_id not in args.only:
            continue
        command = [sys.executable, ROOT / LESSONS[lesson_id]["file"], "4"]
        name = f"lesson {lesson_id}, 4 processes"
        well &= soak(name, command, lesson_id, max(1, round(starts / share)), environment)
    if "9" not in args.only:
        return 0 if well else 1
    command = [LAUNCHER, "--local", "2x2", "9"]
    well &= soak("lesson 9, --local 2x2", command, "9", max(1, starts // 5), environment)
    if os.geteuid() == 0 and shutil.which("slurmctld"):
        environment["LOCAL_SLURM_DIR"] = f"/run/local-slurm-soak-{os.getpid()}"
        cluster, everything = ROOT / "scripts" / "local_slurm.sh", {**os.environ, **environment}
        subprocess.run([cluster, "up", "2"], env=everything, check=True, capture_output=True)
        try:
            command = [cluster, "shell", "salloc", "--quiet", "--nodes", "2", LAUNCHER, "9"]
            name = "lesson 9, two nodes of Slurm"
            well &= soak(name, command, "9", max(1, starts // 10), environment)
        finally:
            subprocess.run([cluster, "down"], env=everything, check=True)
    return 0 if well else 1


if __name__ == "__main__":
    processes.end_on_signals()
    sys.exit(main())
