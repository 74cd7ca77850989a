"""Lesson 14's outer step by its formula, and lesson 18's prediction for measured results."""

import re
import sys

import pytest
import torch
from catalog import load
from support.run import LESSONS, ROOT, load_lesson

PREDICT_STEP = load(ROOT / "scripts" / "predict_step.py")


def test_the_outer_step_is_that_of_diloco(monkeypatch):
    """Nesterov momentum on the way to the mean, by the formula; here one rank is the mean."""
    lesson = load_lesson("14")
    monkeypatch.setattr(lesson.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(lesson.dist, "get_world_size", lambda: 1)
    model = torch.nn.Linear(1, 1, bias=False)
    outer = lesson.OuterOptimizer(model, "DiLoCo 32")
    shared, velocity = model.weight.item(), 0.0
    for _ in range(3):
        model.weight.data += 1  # what the steps alone do
        outer.step()
        velocity = 0.9 * velocity + 1
        shared += 0.7 * (1 + 0.9 * velocity)
        assert model.weight.item() == pytest.approx(shared)


# Parameters, ms of a step on one GPU, samples, nodes, GPUs of each, link, published efficiency.
# Horovod, docs/benchmarks.rst: 128 servers with 4 Pascal GPUs each, 25 Gbit/s. The speed of one
# P100 in batches of 64, 142 and 154 images/s: tensorflow/docs, r1/guide/performance/benchmarks.md.
# Goyal and others, arXiv 1706.02677: from 8 to 256 P100, 50 Gbit/s. Before, 8 of them took 29 hours
# (NVIDIA's developer blog) for 90 epochs of 1.28 million images in batches of 256: 232 ms a step.
PUBLISHED = {
    "Inception V3": (23.8e6, 64_000 / 142, 64, 128, 4, "25Gbit", 0.90),
    "VGG-16": (138.4e6, 64_000 / 154, 64, 128, 4, "25Gbit", 0.68),
    "ResNet-50": (25.6e6, 232, 32, 32, 8, "50Gbit", 0.90),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_results_within_a_quarter(model, monkeypatch, capsys):
    parameters, ms, samples, nodes, gpus, link, efficiency = PUBLISHED[model]
    options = ("--parameters", parameters, "--step-ms", ms, "--samples", samples)
    options += ("--nodes", nodes, "--gpus-per-node", gpus, "--link", link)
    operations = 10 * 6 * (parameters + 3 * 64 * 10)  # 10 tokens, 3 layers of width 64
    options += ("--tokens-per-sample", 10, "--layers", 3, "--width", 64)
    options += ("--peak-tflops", 2 * samples * operations / ms / 1e9)  # one GPU: 50%
    monkeypatch.setattr(sys, "argv", ["predict_step.py", *map(str, options)])
    PREDICT_STEP.main()
    output = capsys.readouterr().out
    assert re.search(rf"^ +1 .* 100% +50.0% +{samples / ms * 1e4:,.0f}(  |$)", output, re.M)
    rows = re.findall(r"^ *(\d+) +[\d.]+ +[\d,]+ +(\d+)%", output, re.M)
    shares = {int(ranks): int(share) for ranks, share in rows}
    first = 1 if gpus == 4 else gpus  # what they compare with: one GPU, or one node
    predicted = shares[nodes * gpus] / shares[first]
    assert abs(efficiency / predicted - 1) <= 0.25  # of the time of a step
    page = (ROOT / LESSONS["18"]["file"]).with_suffix(".md").read_text()
    row = re.search(rf"^\| {model}, .* \| (\d+)% \| (\d+)%", page, re.M)
    assert [int(x) for x in row.groups()] == [round(100 * predicted), round(100 * efficiency)]
