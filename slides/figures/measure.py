"""Measure what two figures are drawn from, and keep it in measured.json beside this file.

Usage: slides/figures/measure.py trace     one step of lesson 5, in the profiler's traces
       slides/figures/measure.py memory    what one step of a small transformer holds

Then draw it: slides/figures/draw.py trace_5, or memory_step. Best on a machine that does nothing
else. --check of draw.py says when the code that was measured has changed.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sources
import torch
import torch.nn.functional as F
from catalog import load
from system_info import described
from torch.profiler import profile, record_function
from view_traces import load_newest, merge


def trace():
    """Return one step's bars on both ranks, [row, begin, ms, name]. Row 0 is below all others.

    Of the recorded steps, it's the one in which the wait for the later rank is the median.
    Two ranks and a large batch, so that the parts of a step are wide enough for labels.
    """
    options = ["2", "--batch-size", "512"]
    script = "day1/5_mnist_manual_ddp_profile.py"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, sources.ROOT / script, *options], cwd=folder, check=True)
        events = merge(load_newest(Path(folder, "log_ddp")))
    events = [e | {"end": e["ts"] + e["dur"]} for e in events if e["ph"] == "X"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    steps = [e for e in steps if e["cat"] == "user_annotation"]
    waits = {}
    for step in steps:
        begins = [find(events, other, "gloo:")["ts"] for other in steps_of(steps, step["name"])]
        waits[step["name"]] = max(begins) - min(begins)
    chosen = sorted(waits, key=waits.get)[len(waits) // 2]
    both = steps_of(steps, chosen)
    start = min(step["ts"] for step in both)
    ranks = []
    for step in both:
        bars, open_until = [], []
        own = [e for e in events if e["pid"] == step["pid"] and within(e, step)]
        for e in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            if e["name"].startswith("gloo:"):
                row = "gloo"
            else:
                open_until = [end for end in open_until if end > e["ts"]]
                row = len(open_until)
                open_until.append(e["end"])
            if row in ("gloo", 0, 1, 2) and e["dur"] > 20:
                times = [round((e["ts"] - start) / 1000, 2), round(e["dur"] / 1000, 2)]
                bars.append([row, *times, e["name"]])
        ranks.append(bars)
    return {"command": f"python {script} {' '.join(options)}", "ranks": ranks}


def within(event, step):
    """Return whether an event begins in a step."""
    return step["ts"] <= event["ts"] < step["end"]


def steps_of(steps, name):
    """Return the step of this name of each rank, in rank order."""
    return sorted((e for e in steps if e["name"] == name), key=lambda e: e["pid"])


def find(events, step, name):
    """Return the first event in a rank's step whose name begins so."""
    own = (e for e in events if e["pid"] == step["pid"] and within(e, step))
    return next(e for e in own if e["name"].startswith(name))


def memory():
    """Return what one step holds: times in ms, and MB of everything and of gradients.

    The model is lesson 15's, wider and with more words, so that its loss has a peak that one sees.
    The profiler says what is allocated and freed. Sizes are those on a GPU, times are not.
    """
    lesson = load("day2/15_transformer_fsdp.py")
    lesson.WIDTH, words, texts = 256, 4096, 16
    torch.set_num_threads(1)
    model = lesson.Net()
    model.tokens = torch.nn.Embedding(words, lesson.WIDTH)
    model.logits = torch.nn.Linear(lesson.WIDTH, words)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note_gradient)
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.randint(words, (texts, lesson.LENGTH))
    for _ in range(2):  # the first step makes Adam's states
        optimizer.zero_grad()
        with profile(profile_memory=True) as profiler:
            with record_function("forward"):
                loss = F.cross_entropy(model(text), text.flatten())
            with record_function("backward"):
                loss.backward()
            with record_function("step"):
                optimizer.step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    passes = {e["name"]: e for e in events if e["name"] in ("forward", "backward", "step")}
    start = passes["forward"]["ts"]
    changes = [(e["ts"], e["args"]["Bytes"], 0) for e in events if e["name"] == "[memory]"]
    gradients = [e for e in events if e["name"].startswith("gradient ")]
    changes += [(e["ts"], 0, int(e["name"].split()[1])) for e in gradients]
    model_bytes = sum(3 * x.nbytes for x in model.parameters())  # and Adam's two states
    held, grown, points = model_bytes, 0, []
    for ts, more, gradient in sorted(changes):
        held, grown = held + more, grown + gradient
        points.append(((ts - start) / 1000, held / 1e6, grown / 1e6))
    span = points[-1][0] / 300  # of the points in a 300th of the step, the highest
    bins = itertools.groupby(points, key=lambda point: int(point[0] / span))
    highest = [max(group, key=lambda point: point[1]) for _, group in bins]
    ends = {x: round((e["ts"] + e["dur"] - start) / 1000, 2) for x, e in passes.items()}
    columns = [[round(x, 2) for x in column] for column in zip(*highest)]
    names = ("ms", "all_mb", "gradients_mb")
    what = {"model_mb": model_bytes / 1e6, "tokens": text.numel(), "vocabulary": words}
    return what | {"ends": ends} | dict(zip(names, columns))


def note_gradient(parameter):
    """Leave the size of a gradient in the trace: that it's there."""
    with record_function(f"gradient {parameter.grad.nbytes}"):
        pass


def main():
    measures = {"trace": trace, "memory": memory}
    if len(sys.argv) != 2 or sys.argv[1] not in measures:
        sys.exit(__doc__)
    name = sys.argv[1]
    new = {"recorded": time.strftime("%Y-%m-%d"), "on": described(), "code": sources.digest(name)}
    new |= measures[name]()
    file = sources.MEASURED
    known = json.loads(file.read_text()) if file.exists() else {}
    lines = [f'"{key}": {json.dumps(value)}' for key, value in (known | {name: new}).items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
