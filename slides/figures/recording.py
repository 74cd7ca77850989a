"""Run what the figures show, and write data/*.json: draw.py --record."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def record():
    """Run what the figures show and write data/*.json."""
    record_sampler()
    record_warm_up()
    record_curve("lesson2", "2_mnist_training")
    record_curve("lesson6", "6_mnist_ddp_pt")
    record_curve("lesson8", "8_mnist_ddp_pt_lr", "alone", "unscaled", "linear")
    launcher = ("scripts/multinode_setup_and_run.sh", "--local", "2x2")
    record_curve("lesson10", "10_mnist_ddp_pt_multinode", launcher=launcher)
