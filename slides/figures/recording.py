"""Run what the figures show, and write data/*.json: draw.py --record."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from sources import DATA, ROOT


def run(*command, cwd):
    """Run a command of this repository in the folder cwd and return what it prints."""
    print("$", *command, flush=True)
    program = [sys.executable if command[0] == "python" else str(ROOT / command[0])]
    arguments = [str(ROOT / x) if x.startswith("day") else x for x in command[1:]]
    done = subprocess.run([*program, *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def read_events(folder):
    """Return the curve that a lesson wrote for TensorBoard: [[images seen, loss], ...]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [[event.step, round(event.value, 4)] for event in events.Scalars("loss/train")]


def write(name, command, **data):
    """Write data/NAME.json with what is needed to tell where the data comes from."""
    import torch

    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} CPU cores, {gpus or 'no'} GPU{'s' * (gpus > 1)}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
        },
        "command": command,
    }
    text = json.dumps(facts | data)
    (DATA / f"{name}.json").write_text(text.replace("], [", "],\n[") + "\n")


def record_curve(name, file, *groups, launcher=None):
    """Run a lesson once; record the curve in its folder of runs/, or those of the groups there."""
    command = (*launcher, f"day2/{file}.py") if launcher else ("python", f"day1/{file}.py")
    with tempfile.TemporaryDirectory() as folder:
        output = run(*command, cwd=folder)
        runs = Path(folder, "runs", file)
        curves = {group: read_events(runs / group) for group in groups or [""]}
    proof = next(line for line in output.splitlines() if line.startswith("=>"))
    rates = dict(re.findall(r"^(\w+): .* learning rate ([\d.]+),", output, re.MULTILINE))
    write(name, " ".join(command), proof=proof, rates=rates, curves=curves)


def record_speed():
    """Run lesson 7 with 2 and with 4 processes; record what each setting gains, and its spread."""
    row = r"^(one process.*?|\w+ scaling) +\d.*  ([\d.]+) \(([\d.]+) to ([\d.]+)\)$"
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in (2, 4):
            output = run("python", "day1/7_mnist_ddp_pt_timing.py", str(processes), cwd=folder)
            found = re.findall(row, output, re.M)
            runs[processes] = {name: [float(x) for x in gains] for name, *gains in found}
    write("lesson7", "python day1/7_mnist_ddp_pt_timing.py N, with N = 2, 4", runs=runs)


def record_sampler():
    """Record which of 16 images DistributedSampler gives to each of 4 ranks, in two epochs."""
    from torch.utils.data import DistributedSampler

    epochs = []
    for epoch in (0, 1):
        samplers = [DistributedSampler(range(16), 4, rank, seed=0) for rank in range(4)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in samplers])
    write("sampler", "DistributedSampler(range(16), 4, rank, seed=0)", epochs=epochs)


def record_warm_up():
    """Record the defaults of lesson 8 that decide its learning rate, as its --help says them."""
    command = ("python", "day1/8_mnist_ddp_pt_lr.py", "--help")
    output = run(*command, cwd=ROOT)
    names = ("processes", "lr", "warm-up")
    found = {
        name: re.search(rf"^ +(?:--)?{name} .*?\(([\d.]+)\)", output, re.M | re.S)[1]
        for name in names
    }
    write("warm_up", " ".join(command), **found)


def ask(url):
    """Return the JSON that a server answers; None while it does not answer."""
    try:
        with urlopen(url, timeout=20) as answer:
            return json.load(answer)
    except OSError:
        return None


def record_profiler():
    """Record what TensorBoard's profiler shows for traces of lesson 5: Overview, Distributed."""
    lesson = ("python", "day1/5_mnist_manual_ddp_profile.py", "--max-steps", "40")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        run(*lesson, cwd=folder)
        command = ["tensorboard.main", "--logdir=./log_ddp", "--host=127.0.0.1", "--port", port]
        server = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stderr=-3)
        try:
            url = f"http://127.0.0.1:{port}/data/plugin/pytorch_profiler"
            while not (ask(f"{url}/runs") or {}).get("runs"):
                time.sleep(1)
            query = "run=log_ddp&span=1&worker"
            steps = ask(f"{url}/overview?{query}=rank0")["steps"]
            ranks = ask(f"{url}/distributed/overlap?{query}=All")
        finally:
            server.terminate()
            server.wait()
    parts = [x["name"] for x in steps["columns"] if x["type"] == "number"]
    rows = [[number for number in row[1:] if not isinstance(number, str)] for row in steps["rows"]]
    write(
        "profiler",
        f"{' '.join(lesson)}, then tensorboard --logdir=./log_ddp",
        overview={"parts": parts, "steps": rows},
        distributed={"parts": ranks["metadata"]["legends"], "ranks": ranks["data"]["all"]},
    )


def record():
    """Run what the figures show and write data/*.json."""
    record_profiler()
    record_sampler()
    record_warm_up()
    record_curve("lesson2", "2_mnist_training")
    record_curve("lesson6", "6_mnist_ddp_pt")
    record_curve("lesson8", "8_mnist_ddp_pt_lr", "alone", "unscaled", "linear")
    launcher = ("scripts/multinode_setup_and_run.sh", "--local", "2x2")
    record_curve("lesson10", "10_mnist_ddp_pt_multinode", launcher=launcher)
    record_speed()
