"""Lesson 17: its schedules by their formulas, and CHOOSE.md's for what a layer and a loss keep."""

import itertools
import json

import pytest
import torch
from support.run import LESSONS, ROOT, load_lesson
from torch.nn.functional import cross_entropy
from torch.profiler import profile

LESSON = ROOT / LESSONS["17"]["file"]
CHOOSE = (ROOT / "day2" / "CHOOSE.md").read_text()


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_each_schedule_is_as_idle_as_the_formula_says(name):
    lesson = load_lesson("17")
    for stages, parts in itertools.product(range(1, 6), range(1, 10)):
        todo = [lesson.SCHEDULES[name](stage, stages, parts) for stage in range(stages)]
        table = lesson.slots([[(*one, []) for one in row] for row in todo])
        idle = sum(row.count("..") for row in table)
        assert idle * (parts + stages - 1) == (stages - 1) * stages * len(table[0])
        for stage, row in enumerate(todo):
            assert sorted(row) == sorted(itertools.product(("forward", "backward"), range(parts)))
            steps = [1 if what == "forward" else -1 for what, _ in row]
            most = parts if name == "GPipe" else min(parts, stages - stage)
            assert max(itertools.accumulate(steps)) == most


@pytest.mark.parametrize(("dtype", "bytes_kept"), [(torch.bfloat16, 32), (torch.float32, 40)])
def test_a_layer_keeps_for_backward_what_choose_says(dtype, bytes_kept):
    lesson = load_lesson("17")
    layer = lesson.Layer().to(dtype)

    def kept(texts):
        x = torch.rand(texts, lesson.LENGTH, lesson.WIDTH, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            return lesson.forward(layer, x)[1]

    more = kept(8) - kept(4)  # without autocast's copies of the weights
    assert more // (4 * lesson.LENGTH * lesson.WIDTH) == bytes_kept
    assert f"{bytes_kept} b s h" in CHOOSE


def test_the_loss_takes_what_choose_says(tmp_path):
    layer, x, targets = torch.nn.Linear(8, 8192), torch.rand(512, 8), torch.arange(512)
    with profile(profile_memory=True) as profiler:
        cross_entropy(layer(x), targets).backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    most = max(itertools.accumulate(change for _, change in sorted(changes)))
    assert most / 512 / 8192 == pytest.approx(12, rel=0.01)
    assert "**12 b s** bytes times the vocabulary" in CHOOSE
