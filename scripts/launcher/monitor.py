"""How busy the CPUs and GPUs of a node are, noted in logs/ while a lesson runs: --monitor."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
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
def watched(names: list[str]) -> Iterator[None]:
    """While the statement runs, write to logs/cpu-NAME.out and gpu-NAME.out for each node here."""
    watchers = []
    for name in names:
        for tool in filter(shutil.which, LINES):
            kind = "cpu" if tool == "vmstat" else "gpu"
            Path("logs").mkdir(exist_ok=True)
            with Path("logs", f"{kind}-{name}.out").open("a") as file:
                command = ["sh", "-c", LINES[tool]]
                watchers.append(subprocess.Popen(command, stdout=file, stderr=file))
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.terminate()
