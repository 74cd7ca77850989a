"""Lessons 15, 17, 19: what a library does is what is done by hand, or by DDP."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import LESSONS, ROOT, once, proof_of, proves, run
from lesson_numbers import NUMBERS
from mutants import assert_disproved, run_mutant, write_mutant
from ranks import run_ranks, skip_what_cannot_run

LESSON_17 = ROOT / LESSONS["17"]["file"]
CHECKPOINT = Path("runs", LESSON_17.stem, "checkpoint")


def test_accelerate_launch_starts_lesson_15_too(tmp_path):
    lesson_15 = str(ROOT / LESSONS["15"]["file"])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", lesson_15]
    status, output = run(launch, 200, tmp_path, None)
    assert status == 0, output
    assert "ranks: 1, device: cpu" in output
    assert proves(output), output


# Lesson 17: FSDP2


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The output of 4 ranks, and the folder in which they left their checkpoint."""

    def run():
        folder = tmp_path_factory.mktemp("four")
        return *run_ranks(4, LESSON_17, "--max-steps", 12, cwd=folder), str(folder)

    status, output, folder = once(tmp_path_factory, "four", run)
    skip_what_cannot_run(status, output)
    assert status == 0, output
    return output, Path(folder)


def megabytes(name, output):
    """Return what a rank holds with DDP or FSDP: parameters, gradients, states; inside a layer."""
    row = re.search(rf"^{name}, MB a rank: (.*); inside a layer (.*)$", output, re.M)
    between, inside = [[float(x) for x in re.findall(r"[\d.]+", part)] for part in row.groups()]
    return between, inside[0]


def loss(name, epoch, output):
    return float(re.search(rf"^{name}, epoch {epoch}: loss ([\d.]+)", output, re.M)[1])


def test_four_ranks_hold_a_quarter_and_learn(four):
    output, folder = four
    assert proves(output), output
    (whole, whole_inside), (part, part_inside) = megabytes("DDP", output), megabytes("FSDP", output)
    for of_four, of_one in zip(part, whole, strict=True):
        assert of_four <= 0.27 * of_one
    # A layer is whole in its turn, the others are not.
    assert 2 * part[0] < part_inside < 0.7 * whole_inside
    assert loss("FSDP", 1, output) < 1.88  # 2.35 if one knows only how frequent each character is
    assert len(list((folder / CHECKPOINT).glob("*.distcp"))) == 4  # each rank writes its own


def test_two_ranks_go_on_where_four_stopped(four, tmp_path):
    before, folder = four
    shutil.copytree(folder / "runs", tmp_path / "runs")
    status, output = run_ranks(2, LESSON_17, "--resume", cwd=tmp_path)
    assert status == 0, output
    assert proof_of(output).startswith("=> 2 ranks go on where 4 stopped, losses within ")
    assert loss("resumed", 1, output) == pytest.approx(loss("FSDP", 1, before), abs=2e-4)


@pytest.mark.full
def test_weights_without_adams_states_do_not_go_on_where_they_stopped(four, tmp_path):
    shutil.copytree(four[1] / "runs", tmp_path / "runs")
    change = ('dcp.load({"model": weights, "optimizer": states}', 'dcp.load({"model": weights}')
    output = run_mutant("17", change, 1, "--resume", cwd=tmp_path)
    says = r"^=> 1 ranks go on where 4 stopped, losses within \S+ \(limit 1e-05\): WRONG$"
    assert_disproved(output, says)


def test_a_torch_that_cannot_shard_is_refused(tmp_path):
    """gloo of older versions gives the sum, and Adam would hide that the gradients are wrong."""
    newer = ('hasattr(FSDPModule, "set_force_sum_reduction_for_comms")', "False")
    status, output = run_ranks(2, write_mutant(tmp_path, "17", newer), cwd=tmp_path)
    assert status == os.EX_UNAVAILABLE
    assert "Traceback" not in output
    sentence = r"^torch \S+ cannot shard here: take 2.8 or newer$"
    assert len(re.findall(sentence, output, re.M)) == 1  # of one rank


# Lesson 19: tensor parallel


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "tensor"), [(4, 4), (4, 1), (2, 2), (2, 1)])
def test_every_mesh_has_the_losses_of_one_process(ranks, tensor, tmp_path):
    options = ["--tensor", tensor, "--max-steps", 20]
    status, output = run_ranks(ranks, ROOT / LESSONS["19"]["file"], *options, cwd=tmp_path)
    assert status == 0, output
    assert f"\n=> mesh {ranks // tensor} x {tensor}: " in output
    NUMBERS["19"](output, ranks, tmp_path)


# Trains lesson 19's model alone, then with the lines of its page: fully_shard over the columns of
# a mesh, parallelize_module over the rows. The arguments are the folder scripts, and these lines.
BOX = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, DistributedSampler
sys.path.insert(0, sys.argv[1])
from course.lists import load
lesson = load("day2/19_transformer_tensor_parallel.py")
dist.init_process_group("gloo")
device = torch.device("cpu")
train_set, _ = lesson.make_text()
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
def test_the_box_of_lesson_19_has_the_losses_of_one_process(tmp_path):
    page = (ROOT / LESSONS["19"]["file"]).with_suffix(".md").read_text()
    box = re.search(r"\n## In your own script\n.*?```python\n(.*?)```", page, re.S)[1]
    file = tmp_path / "box.py"
    file.write_text(BOX)
    status, output = run_ranks(4, file, ROOT / "scripts", box, cwd=tmp_path)
    assert status == 0, output
    loss = {parts: float(x) for parts, x in re.findall(r"^([12]) ([\d.]+)$", output, re.M)}
    assert loss["2"] == pytest.approx(loss["1"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "128x8",
            "128 all_reduce, 8.59 GB, each 67.1 MB\ndata group, a step: 1 all_reduce, 3.30 GB",
        ),
        ("3x1 --layers 1", "0 all_reduce, 0.00 GB\ndata group, a step: 1 all_reduce, 0.88 GB"),
        ("128x8 --width 64", "error: the width must be a multiple of 16 x 8\n"),
        ("128", "error: the mesh must be like 128x8, not 128\n"),
    ],
)
def test_messages_are_counted_on_ranks_that_do_not_exist(arguments, says, tmp_path):
    command = [sys.executable, ROOT / "scripts" / "count_messages.py", *arguments.split()]
    status, output = run(command, 100, tmp_path, None)
    skip_what_cannot_run(status, output)
    assert says in output
    assert status == (2 if "error" in says else 0)
