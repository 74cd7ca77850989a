"""Every lesson as a user runs it, and the chain of equal losses."""

import os
import platform
import re
import sys

import pytest
from support.cases import ONE_PROCESS, arguments_of
from support.forked_ranks import run_ranks, skip_what_cannot_run
from support.output_checks import NUMBERS
from support.run import (
    LESSONS,
    ROOT,
    cached_across_workers,
    launch,
    losses,
    output_of,
    proof_of,
    proves,
    recorded_output,
    run_lesson,
    same_losses,
    shape,
)

full = pytest.mark.full

# Each lesson, short

# A torch that was built without CUDA: the stand-in answers for it.
NO_CUDA = {"PYTHONPATH": str(ROOT / "tests" / "gpu"), "STANDIN_KIND": "none"}


def run_short(lesson_id, ranks, arguments, folder, env):
    """Run a lesson as its page says; return (exit status, output).

    Each rank of Day 2 is on an simulated node of its own. Four are on two nodes.
    """
    lesson = LESSONS[lesson_id]
    if lesson["nodes"]:
        nodes = "2x2" if ranks == 4 else ranks
        command = ["--local", nodes, *lesson.get("launcher", []), ROOT / lesson["file"], *arguments]
        return launch(*map(str, command), cwd=folder, env=env)
    if lesson_id not in ONE_PROCESS:
        arguments = [str(ranks), *arguments]
    return run_lesson(lesson_id, *arguments, cwd=folder, env=env)


def quick_and_full():
    """Return each lesson with the numbers of ranks on which it runs: the first one quickly."""
    runs = []
    for lesson_id in LESSONS:
        ranks = 4 if lesson_id in ("9", "10", "18", "16", "17") else 2
        if lesson_id in ONE_PROCESS:
            ranks = 1
        runs.append((lesson_id, ranks, {}, pytest.mark.short))
        if lesson_id not in ONE_PROCESS:
            runs.append((lesson_id, 1, {}, full))
            if lesson_id != "15":  # it refuses 3: their parts would not be equal
                runs.append((lesson_id, 3, NO_CUDA, full))
    runs.append(("4", 7, {}, full))  # 7 does not divide 60,000
    return [pytest.param(*run, marks=mark, id=f"{run[0]}-{run[1]}") for *run, mark in runs]


@pytest.mark.parametrize(("lesson_id", "ranks", "env"), quick_and_full())
def test_a_lesson_runs_as_its_page_says(lesson_id, ranks, env, tmp_path, tmp_path_factory):
    arguments = arguments_of(lesson_id, tmp_path, tmp_path_factory)
    status, output = run_short(lesson_id, ranks, arguments, tmp_path, env)
    skip_what_cannot_run(status, output)
    assert status == 0, output
    assert proves(output), output
    assert "Traceback" not in output
    assert "Warning" not in output  # it may be an error in a later PyTorch
    as_on_page = ranks in (2, 4) or lesson_id in ONE_PROCESS  # others lack a row of a pair, ...
    if as_on_page and "TEST_WITH_GPUS" not in os.environ:  # the pages show what CPUs print
        printed = kinds_of_lines(as_recorded(output))
        assert printed == kinds_of_lines(recorded_output(lesson_id))
    if lesson_id in NUMBERS:
        NUMBERS[lesson_id](output, ranks, tmp_path)


def as_recorded(output):
    """Return an output with the names of the pages: of the machine, Python and the folder."""
    output = output.replace(platform.node(), "this-machine").replace(sys.executable, "python")
    return re.sub(r"/\S+/(?=mnist\.h5|ratings)", "data/", output)


def kinds_of_lines(output):
    """Return the kinds of lines before the proof, whose words may depend on its numbers.

    What torchrun logs when it restarts a job does not count.
    """
    lines = shape(output.rpartition("=> ")[0])
    return {line for line in lines if not re.match(r"[WE]#", line)}


# The chain of equal losses

# Lessons that train on the same global batches of 84 images as lesson 2: their options, and how
# many of its losses they give. {share} is a rank's part of a batch. 84 = 3 x 4 x 7.
TWO_EPOCHS = "--epochs 2 --max-steps 10"  # the second one has another order
CHAIN = {
    "4": (f"{TWO_EPOCHS} --batch-size {{share}}", 20),
    "5": ("--max-steps 5 --batch-size {share}", 10),  # and 5 steps to warm up
    "6": (f"{TWO_EPOCHS} --batch-size {{share}}", 20),
    "10": (f"{TWO_EPOCHS} --batch-size {{share}}", 20),
    "7": (f"{TWO_EPOCHS} --rounds 1 --batch-size 84", 20),
}


def train_alone(tmp_path_factory):
    """Return what lesson 2 prints in 20 steps with batches of 84, and their losses."""

    def run():
        folder = tmp_path_factory.mktemp("alone")
        arguments = (*TWO_EPOCHS.split(), "--batch-size", 84)
        output = run_ranks(1, ROOT / LESSONS["2"]["file"], *arguments, cwd=folder)[1]
        assert "\n=> " in output, output  # 20 steps may be too few for its limit
        return output, losses(folder / "runs" / "2_mnist_training")

    return cached_across_workers(tmp_path_factory, "alone", run)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=full) for n in (1, 2, 4, 7))])
@pytest.mark.parametrize("lesson_id", CHAIN)
def test_ranks_that_share_a_batch_have_the_losses_of_one(
    lesson_id, ranks, tmp_path_factory, tmp_path
):
    options, steps = CHAIN[lesson_id]
    arguments = options.format(share=84 // ranks).split()
    file = ROOT / LESSONS[lesson_id]["file"]
    output_of(run_ranks(ranks, file, *arguments, cwd=tmp_path))
    alone = train_alone(tmp_path_factory)[1][:steps]
    shared = losses(tmp_path / "runs" / file.stem)[:steps]
    assert [images for images, _ in shared] == [images for images, _ in alone]
    assert same_losses([loss for _, loss in shared], [loss for _, loss in alone])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=full)])
def test_each_rank_of_lesson_3_has_lesson_2s_loss(ranks, tmp_path_factory, tmp_path):
    arguments = (*TWO_EPOCHS.split(), "--batch-size", 84)
    output = output_of(run_ranks(ranks, ROOT / LESSONS["3"]["file"], *arguments, cwd=tmp_path))
    printed = r"mean loss ([\d.]+)"
    alone = float(re.search(printed, train_alone(tmp_path_factory)[0])[1])
    found = re.findall(rf"^rank \d+: .* {printed}$", output, re.M)
    assert [float(loss) for loss in found] == pytest.approx([alone] * ranks, abs=2e-4)
    claim = f"=> {ranks} ranks, {ranks * 20 * 84:,} images, 1 model (limit 1): ok"
    assert proof_of(output) == claim
