"""A script of one's own: the boxes of the pages are applied in their order, and train."""

import ast
import os
import re
import runpy
import signal
import subprocess
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from docs.blocks import Course
from support import page_diffs
from support.cases import written_by
from support.forked_ranks import run_ranks
from support.run import LAUNCHER, LESSONS, ROOT, full, output_of, rank_of

PAGE = "day1/OWN_SCRIPT.md"
ORDER = ["6", "testing", "7", "8", "11", "12", "13", "15"]
# Where a box stands, and what comes before it on its page.
PLACES = {x["id"]: (x["file"], "\n## In your own script\n") for x in Course().pages if "id" in x}
PLACES |= {
    "twelve": (PAGE, "\n## Twelve lines for your own script\n"),
    "testing": (PAGE, "\n## Testing on all ranks\n"),
    "equal": (PAGE, "\n**Equal parameters.**"),
}
# Without all that keeps N ranks from having the losses of one process.
REPEATABLE = ("--norm", "group", "--dropout", 0, "--no-augment")
FULL = pytest.mark.full


def changed(script, box):
    """Return a script after the changes that a box shows."""
    page, before = PLACES[box]
    text = (ROOT / page).read_text().partition(before)[2]
    script = page_diffs.apply(page_diffs.diffs_in(text)[0], script)
    if box == "11":
        lesson = (ROOT / LESSONS["11"]["file"]).read_text()
        nodes = {x.name: x for x in ast.parse(lesson).body if isinstance(x, ast.ClassDef)}
        stream = ast.get_source_segment(lesson, nodes["ChunkStream"])
        script, count = re.subn("^# Here stands the class .*$", stream, script, flags=re.M)
        assert count == 1
    return script


@pytest.fixture
def patched_script(tmp_path):
    """A function that writes the usual script after some boxes; it returns the file."""
    if torch.__version__ < (2, 8):
        pytest.skip("this torch cannot shard on CPUs")

    def write(*names):
        text = (ROOT / "day1" / "usual_script.py").read_text()
        for name in names:
            text = changed(text, name)
        file = tmp_path / "train.py"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def stream(tmp_path_factory):
    """The option for a file that create_mnist_h5.py has written."""
    return ["--train-file", written_by("create_mnist_h5", tmp_path_factory) / "mnist.h5"]


def options(*more, epochs=2, steps=20, workers=0):
    given = ("--data", ROOT / "data", "--epochs", epochs, "--max-steps", steps)
    return [str(x) for x in (*given, "--workers", workers, *more)]


def results(output):
    """Return what the lines of the epochs say: [[epoch, loss, test loss, accuracy], ...]."""
    lines = re.findall(r"^epoch (\d+): loss ([\d.]+), test ([\d.]+), ([\d.]+)%", output, re.M)
    assert lines, output
    return [[float(x) for x in line] for line in lines]


def assert_alike(mine, theirs):
    """Rounding grows with each step, and an accuracy counts single images."""
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs):
        assert one[:3] == pytest.approx(other[:3], abs=2e-3)
        assert one[3] == pytest.approx(other[3], abs=0.1)


def before(box, without=()):
    """Return the boxes up to this one, in their order."""
    return [x for x in ORDER[: ORDER.index(box) + 1] if x not in without]


@FULL
@pytest.mark.parametrize(
    "names", [*(before(box) for box in ORDER), [*before("13"), "14"]], ids=lambda names: names[-1]
)
def test_after_each_box_two_ranks_train_one_model(names, patched_script, stream, tmp_path):
    file = patched_script(*names, *["equal"] * ("15" not in names))
    more = stream if "11" in names else []
    output = output_of(run_ranks(2, file, *options(*more), cwd=tmp_path))
    assert output.count("has rank 0's model: True") == (0 if "15" in names else 2), output
    assert [x[0] for x in results(output)] == [0, 1]  # one rank prints
    assert results(output)[-1][3] > 80
    saved = torch.load(tmp_path / "model.pt")
    assert saved["fc.weight"].shape == (10, 512)
    assert "module.fc.weight" not in saved
    assert "Warning" not in output


@pytest.mark.parametrize(
    ("last", "ranks"), [("15", 3), *(full(box, 2) for box in ("6", "8", "13", "15"))]
)
def test_the_losses_are_those_of_one_process(last, ranks, patched_script, tmp_path):
    """Of one without accumulation, and also after the last one has resumed.

    Without lesson 11's stream: there each rank has its chunks.
    """
    found = []
    for box, n in (("6" if last == "6" else "8", 1), (last, ranks)):
        file, folder = patched_script(*before(box, without=["11"])), tmp_path / f"{box} {n}"
        folder.mkdir()
        parts = 2 if box in ("13", "15") else 1
        more = ["--batch-size", 48 // n // parts, *REPEATABLE]
        if parts == 2:  # a clipped gradient would hide a wrong factor
            more += ["--accumulate", parts, "--clip", 1e9]
        if box != "6":  # with FSDP, ranks that test a different number of batches would hang
            more += ["--test-batch-size", 3333]
        found.append([])
        for epochs in [2] if box in ("6", "8") else [1, 2]:
            how = options(*more, epochs=epochs, steps=20 * parts)
            found[-1] += results(output_of(run_ranks(n, file, *how, cwd=folder)))
    assert_alike(*found)


@pytest.mark.parametrize("how", [REPEATABLE, full(())], ids=["repeatable", "usual"])
def test_twelve_lines_make_a_script_distributed(how, patched_script, tmp_path):
    found = []
    for ranks in (1, 2):
        (folder := tmp_path / str(ranks)).mkdir()
        more = options(*how, "--batch-size", 48 // ranks)
        output = output_of(run_ranks(ranks, patched_script("twelve"), *more, cwd=folder))
        found.append([[epoch, 0, *tested] for epoch, _, *tested in results(output)])
        assert torch.load(folder / "model.pt")["fc.weight"].shape == (10, 512)
    if how:
        assert_alike(*found)
    assert [x[0] for x in found[1]] == [0, 1]  # one rank prints
    assert found[1][-1][3] > 80


@pytest.mark.parametrize("seen", [4, 2, 1])
def test_each_rank_takes_its_gpu(seen, patched_script, monkeypatch):
    """Four ranks, each of which sees so many GPUs. None is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    start = runpy.run_path(str(patched_script("6")))["start"]
    for rank in range(4):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
        index = mock.patch.object(torch.accelerator, "set_device_index")
        init = mock.patch.object(dist, "init_process_group")
        with mock.patch.dict(os.environ, env), index as index, init as init:
            device = start()
        assert device == torch.device("cuda", rank % seen)
        index.assert_called_once_with(device.index)
        assert init.call_args.args == ("nccl",)
        assert init.call_args.kwargs["device_id"] == device
        assert init.call_args.kwargs["timeout"].total_seconds() >= 60


@FULL
@pytest.mark.parametrize("last", ["12", "15"])
def test_killed_it_resumes_as_if_nothing_had_been(last, patched_script, stream, tmp_path):
    file, one, other = patched_script(*before(last)), tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    how_long = options(*stream, "--no-augment", epochs=3, workers=1)
    command = [LAUNCHER, "--local", "1x2", "--max-restarts", "1", file, *how_long]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with processes.Job(command, 200, cwd=one, env=env, stderr=subprocess.STDOUT) as job:
        next(line for line in job.lines() if line.startswith("epoch 0: "))
        os.kill(rank_of(job, 1), signal.SIGKILL)
        job.wait()
    said = [log.read_text() for log in one.rglob("stderr.log")]  # where torchrun has put it
    assert job.status == 0, "\n".join([job.output, *said])
    assert re.search(r"^checkpoint.pt: 1 epochs are done, 2 are left$", job.output, re.M)
    output = output_of(run_ranks(2, file, *how_long, cwd=other))
    assert_alike(results(job.output)[-2:], results(output)[-2:])
    weights, expected = (torch.load(folder / "model.pt") for folder in (one, other))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("last", "not_with"), [("13", "15"), full("15", "13")])
def test_only_the_same_training_is_continued(last, not_with, patched_script, tmp_path):
    def train(last, *more):
        file = patched_script(*before(last, without=["11"]))
        return run_ranks(2, file, *options(*more, epochs=1, steps=2), cwd=tmp_path)

    output_of(train(last))
    output = output_of(train(last))
    assert "checkpoint.pt: 1 epochs are done, 0 are left\n" in output
    assert "epoch 0" not in output
    for box, more, name in ((last, ["--lr", 0.5], "lr"), (not_with, [], "sharded")):
        output = output_of(train(box, *more), 1)
        assert f"was written with a different {name}. Take another --checkpoint." in output
