"""How busy the CPUs and GPUs of a node are, noted in logs/ while a lesson runs: --monitor."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

# What prints this once a second: for CPUs, and by the tool of the GPUs' maker.
NVIDIA = "--query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv --loop=1"
LINES = {
    "vmstat": "exec vmstat -n -t -S M 1",
    "nvidia-smi": f"exec nvidia-smi {NVIDIA}",
    "rocm-smi": "while sleep 1; do rocm-smi --showuse --showmemuse --csv; done",
    "xpu-smi": "exec xpu-smi dump --device -1 --metrics 0,18",  # how busy, memory used
}


@contextlib.contextmanager
def watched(names):
    """While the statement runs, write to logs/, in files of these names: one for each node here."""
    watchers = []
    try:
        for name in names:
            watchers += start_watchers(Path("logs"), name)
        yield
    finally:
        for watcher in watchers:
            watcher.terminate()


def start_watchers(folder, name):
    """Start what writes to cpu-NAME.out and gpu-NAME.out in a folder. Return the Popen objects."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        sys.exit(f"--monitor writes to {folder}/, which cannot be made here: {error.strerror}.")
    watchers = []
    for tool, line in LINES.items():
        kind = "cpu" if tool == "vmstat" else "gpu"
        if kind == "cpu" or shutil.which(tool):
            with (folder / f"{kind}-{name}.out").open("a") as file:
                watchers.append(subprocess.Popen(["sh", "-c", line], stdout=file, stderr=file))
    return watchers
