"""Start lessons many times in a row and look for what fails, and for what is left behind.

Usage: python tests/soak.py [--starts N] [--nodes-starts N]

200 starts of lesson 0 with 4 processes, and 50 of lesson 9 on two nodes: of a Slurm cluster that is
brought up for it where that is possible, imitated ones elsewhere. Not part of the tests: on 2 cores
it takes half an hour. The exit status is 1 if a start failed or left something.
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

from helpers import LAUNCHER, LESSONS, ROOT, proves

MARK = "SOAK"
# Memory that is somebody's. The rest caches files, and is given back when it is needed.
HELD = ("AnonPages", "Shmem", "SUnreclaim", "KernelStack", "PageTables")


def processes():
    """Return the ids of the living processes that a start has left."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"\0{MARK}={os.getpid()}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it ended in this moment, or is somebody else's
    return found


def ports():
    """Return how many sockets listen in this machine's network."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    return sum(len(re.findall(r"^ *\d+: \S+ \S+ 0A ", table, re.M)) for table in tables)


def used():
    """Return {what: how much} of all that a start may leave."""
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    names = os.listdir("/dev/shm")
    # Not PyTorch's one folder for what it compiles.
    files = os.listdir(tempfile.gettempdir())
    return {
        "processes": len(processes()),
        "listening ports": ports(),
        "semaphores": sum(name.startswith("sem.") for name in names),
        "shared memory": sum(not name.startswith("sem.") for name in names),
        "System V semaphores": len(Path("/proc/sysvipc/sem").read_text().splitlines()) - 1,
        "temporary files": sum(not name.startswith("torchinductor_") for name in files),
        "MB of memory": sum(int(memory[kind]) for kind in HELD) // 1024,
    }


def soak(name, command, lesson_id, starts, env):
    """Start a command many times; print failures and what has grown. Return whether all is well."""
    failures, seconds = 0, []
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder, "tmp")
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        environment = {**os.environ, **env, MARK: str(os.getpid()), "TMPDIR": str(temporary)}
        before = used()
        for number in range(1, starts + 1):
            begin = time.monotonic()
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                well, said = proves(lesson_id, done.stdout), done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                well, said = False, f"not at an end after 120 s\n{error.output}"
            seconds.append(time.monotonic() - begin)
            if not well:
                failures += 1
                print(f"{name}, start {number} failed:\n{said}")
            if number % 10 == 0:
                print(f"{name}: {number} of {starts}, {failures} failed", flush=True)
        time.sleep(3)  # Python's own helpers notice a moment later that they are no longer needed
        after = used()
        tempfile.tempdir = None
    grown = {what: after[what] - before[what] for what in before}
    times = f"{sum(seconds) / len(seconds):.1f} s each, at most {max(seconds):.1f} s"
    print(f"=> {name}: {starts} starts, {failures} failed, {times}")
    print("   more than before: " + ", ".join(f"{more} {what}" for what, more in grown.items()))
    # Memory and ports belong to the whole machine, which may do other things too.
    own = ("processes", "semaphores", "System V semaphores", "temporary files")
    return not failures and not any(grown[what] > 0 for what in own)


def main():
    """Soak both; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=200, help="of lesson 0 (200)")
    parser.add_argument("--nodes-starts", type=int, help="of lesson 9 (a quarter of those)")
    args = parser.parse_args()
    on_nodes = args.nodes_starts or max(1, args.starts // 4)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, ROOT / LESSONS["0"]["file"], "4"]
    well = soak("lesson 0, 4 processes", command, "0", args.starts, environment)
    if os.geteuid() == 0 and shutil.which("slurmctld"):
        environment["LOCAL_SLURM_DIR"] = f"/run/local-slurm-soak-{os.getpid()}"
        cluster, everything = ROOT / "scripts" / "local_slurm.sh", {**os.environ, **environment}
        subprocess.run([cluster, "up", "2"], env=everything, check=True, capture_output=True)
        try:
            command = [cluster, "shell", "salloc", "--quiet", "--nodes", "2", LAUNCHER, "9"]
            well &= soak("lesson 9, two nodes of Slurm", command, "9", on_nodes, environment)
        finally:
            subprocess.run([cluster, "down"], env=everything, check=True)
    else:
        command = [LAUNCHER, "--local", "2", "9"]
        well &= soak("lesson 9, two imitated nodes", command, "9", on_nodes, environment)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
