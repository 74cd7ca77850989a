"""Lesson 20: the schedules by their formulas, and PyTorch's own pipeline beside the lesson's.

And CHOOSE.md's formulas for activations, counted as lesson 20 counts them.
"""

import itertools
import json
import re

import pytest
import torch
from helpers import LESSONS, ROOT, load_lesson, refusal
from ranks import run_ranks
from torch.nn.functional import cross_entropy
from torch.profiler import profile

LESSON = ROOT / LESSONS["20"]["file"]
CHOOSE = (ROOT / "day2" / "CHOOSE.md").read_text()


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_each_schedule_is_as_idle_as_the_formula_says(name):
    lesson = load_lesson("20")
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


def test_the_stages_are_the_model():
    lesson = load_lesson("20")
    for stages in (1, 2, 3, 4):
        parts = [lesson.Stage(stage, stages, 0) for stage in range(stages)]
        weights = [tensor for part in parts for tensor in part.state_dict().values()]
        assert sum(tensor.numel() for tensor in weights) == 220_544
        whole = lesson.Stage(0, 1, 0).state_dict().values()
        assert all(map(torch.equal, weights, whole))


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--micro-batches", 5], {}, "the micro-batches must divide the batch evenly, up to 1280"),
        (["--micro-batches", 0], {}, "batch size, micro-batches and steps must be at least 1"),
        ([], {"RANK": "0", "WORLD_SIZE": "5"}, "at most 4 ranks: each needs a layer of its own"),
    ],
)
def test_what_cannot_be_divided_is_refused(arguments, env, says):
    status, output = refusal("20", *arguments, env=env)
    assert status == 2
    assert says in output


OWN = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
sys.path.insert(0, {folder!r})
lesson = __import__({name!r})
dist.init_process_group("gloo")
rank, cpu = dist.get_rank(), torch.device("cpu")
train_set, _ = lesson.make_text()
for kind in (ScheduleGPipe, Schedule1F1B):
    stage = lesson.Stage(rank, 2, 0)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.003, eps=1e-3)
    loss_fn = lambda scores, targets: F.cross_entropy(scores, targets.flatten())
    schedule = kind(PipelineStage(stage, rank, 2, cpu), n_microbatches=8, loss_fn=loss_fn)
    order = torch.utils.data.RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(train_set, 32, sampler=order)
    losses = []
    for (text, targets), _ in zip(loader, range(20)):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(text)
        else:
            parts = []
            schedule.step(target=targets, losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
    if rank == 1:
        print("mean loss", sum(losses) / 20)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this torch's pipelining hangs on CPUs")
def test_pytorchs_own_schedules_have_the_lessons_losses(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN.format(folder=str(LESSON.parent), name=LESSON.stem))
    status, own = run_ranks(2, file, cwd=tmp_path)
    assert status == 0, own
    status, by_hand = run_ranks(2, LESSON, "--max-steps", 20, cwd=tmp_path)
    assert status == 0, by_hand
    losses = [
        [float(x) for x in re.findall(r"mean loss ([\d.]+)$", output, re.M)]
        for output in (own, by_hand)
    ]
    assert losses[0] == pytest.approx([losses[1][0]] * 2, abs=6e-5)  # four digits are printed


@pytest.mark.parametrize(("dtype", "bytes_kept"), [(torch.bfloat16, 32), (torch.float32, 40)])
def test_a_layer_keeps_for_backward_what_choose_says(dtype, bytes_kept):
    lesson = load_lesson("20")
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
