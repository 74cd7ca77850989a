"""Lessons 16 and 20: what a library does is what is done by hand, or by DDP."""

import re
import sys

import pytest
import torch
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, output_of, proves, run


@pytest.mark.full
def test_accelerate_launch_starts_lesson_20_too(tmp_path):
    lesson_20 = str(ROOT / LESSONS["20"]["file"])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", lesson_20]
    output = output_of(run(launch, 200, tmp_path, None))
    assert "ranks: 1, device: cpu" in output
    assert proves(output), output


# Trains lesson 16's model alone, then with the lines of its page: fully_shard over a data group,
# parallelize_module over a tensor group. The arguments are the folder scripts, and these lines.
BOX = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from datetime import timedelta
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, DistributedSampler
sys.path.insert(0, sys.argv[1])
from catalog import load
lesson = load("day2/16_transformer_tensor_parallel.py")
dist.init_process_group("gloo")
device = torch.device("cpu")
make_mesh = lesson.make_mesh
train_set = lesson.make_text()
plans = []
lesson.tp.parallelize_module = lambda layer, mesh, plan: plans.append(plan)
lesson.split_by_pytorch(lesson.Net(), {"tensor": None})
plan = plans[0]
for parts in (1, 2):
    torch.manual_seed(0)
    model = lesson.Net()
    sampler = DistributedSampler(train_set, 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    if parts == 2:
        exec(sys.argv[2])
    loader = DataLoader(train_set, 32 // parts, sampler=sampler)
    for step, (text, targets) in zip(range(5), loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text), targets.flatten())
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    print(parts, loss.item() / 4)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this torch cannot shard on CPUs")
def test_the_box_of_lesson_16_has_the_losses_of_one_process(tmp_path):
    page = (ROOT / LESSONS["16"]["file"]).with_suffix(".md").read_text()
    box = re.search(r"\n## In your own script\n.*?```python\n(.*?)```", page, re.S)[1]
    file = tmp_path / "box.py"
    file.write_text(BOX)
    output = output_of(run_ranks(4, file, ROOT / "scripts", box, cwd=tmp_path))
    loss = {parts: float(x) for parts, x in re.findall(r"^([12]) ([\d.]+)$", output, re.M)}
    assert loss["2"] == pytest.approx(loss["1"], abs=1e-5)
