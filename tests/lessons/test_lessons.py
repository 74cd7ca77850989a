"""Every lesson as a user runs it, the chain of equal losses, and mutants, which prove nothing."""

import os
import platform
import re
import sys

import pytest
from records import kinds_of_lines
from support.cases import CASES, arguments_of, variants_of
from support.forked_ranks import run_ranks, skip_what_cannot_run
from support.mutants import assert_disproved, write_mutant
from support.run import (
    LESSONS,
    ROOT,
    cached_across_workers,
    launch,
    losses,
    output_of,
    proves,
    recorded_output,
    run,
    same_losses,
)

full = pytest.mark.full
WITH_GPUS = "TEST_WITH_GPUS" in os.environ
# What the launcher says before the ranks begin.
OF_THE_LAUNCHER = ("nodes: ", "rendezvous: ", "each rank: ")


def run_short(lesson_id, ranks, arguments, folder):
    """Run a lesson as its page says; return (exit status, output).

    Each rank of Day 2 is on a simulated node of its own. Four are on two nodes.
    """
    lesson = LESSONS[lesson_id]
    if lesson["nodes"]:
        nodes = "2x2" if ranks == 4 else ranks
        command = ["--local", nodes, *lesson.get("launcher", []), ROOT / lesson["file"], *arguments]
        return launch(*map(str, command), cwd=folder)
    if CASES[lesson_id].ranks > 1:
        arguments = [str(ranks), *arguments]
    command = [sys.executable, ROOT / lesson["file"], *arguments]
    return run(command, 200, folder, {"PYTHONUNBUFFERED": "1"})


def fork_short(lesson_id, ranks, arguments, folder):
    """Do the same quickly: fork the ranks from a process that has imported torch."""
    lesson = LESSONS[lesson_id]
    each = ranks // 2 if lesson["nodes"] else ranks
    env = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}  # left from another job
    how = {"cwd": folder, "ranks_per_node": each, "env": env}
    return run_ranks(ranks, ROOT / lesson["file"], *arguments, **how)


def assert_proves(lesson_id, ranks, status, output, folder, tmp_path_factory):
    """Assert what must hold of each run, however many ranks there are."""
    case = CASES[lesson_id]
    skip_what_cannot_run(status, output)
    assert status == 0, output
    assert proves(output), output
    assert "Traceback" not in output
    assert "Warning" not in output  # it may be an error in a later PyTorch
    if case.check:
        case.check(output, ranks, folder)
    if case.chain:
        alone = losses_alone(tmp_path_factory)[: case.chain]
        shared = losses(folder / "runs" / (ROOT / LESSONS[lesson_id]["file"]).stem)[: case.chain]
        assert [images for images, _ in shared] == [images for images, _ in alone]
        assert same_losses([loss for _, loss in shared], [loss for _, loss in alone])


def losses_alone(tmp_path_factory):
    """Return the losses of lesson 2 in 20 steps with batches of 84: [(images seen, loss), ...]."""

    def run():
        folder = tmp_path_factory.mktemp("alone")
        file = ROOT / LESSONS["2"]["file"]
        output = run_ranks(1, file, *arguments_of("3", tmp_path_factory), cwd=folder)[1]
        assert "\n=> " in output, output  # 20 steps may be too few for its limit
        return losses(folder / "runs" / file.stem)

    return cached_across_workers(tmp_path_factory, "alone", run)


@pytest.mark.short
@pytest.mark.parametrize("lesson_id", LESSONS)
def test_a_lesson_prints_what_its_page_shows(lesson_id, tmp_path, tmp_path_factory):
    case = CASES[lesson_id]
    arguments = arguments_of(lesson_id, tmp_path_factory, ranks=case.ranks, folder=tmp_path)
    cold = case.cold or WITH_GPUS
    run_it = run_short if cold else fork_short
    status, output = run_it(lesson_id, case.ranks, arguments, tmp_path)
    assert_proves(lesson_id, case.ranks, status, output, tmp_path, tmp_path_factory)
    # The pages show what CPUs print. Of torch 2.8, gloo says in between that it connects.
    if not WITH_GPUS and "[Gloo]" not in output:
        printed = kinds_of_lines(as_recorded(output))
        shown = kinds_of_lines(recorded_output(lesson_id))
        if not cold:
            shown = {line for line in shown if not line.startswith(OF_THE_LAUNCHER)}
        assert printed == shown


@full
@pytest.mark.parametrize(
    ("lesson_id", "ranks"), [(name, ranks) for name, case in CASES.items() for ranks in case.others]
)
def test_a_lesson_runs_on_other_numbers_of_ranks(lesson_id, ranks, tmp_path, tmp_path_factory):
    arguments = arguments_of(lesson_id, tmp_path_factory, ranks=ranks)
    status, output = run_short(lesson_id, ranks, arguments, tmp_path)
    assert_proves(lesson_id, ranks, status, output, tmp_path, tmp_path_factory)


def as_recorded(output):
    """Return an output with the names of the pages: of the machine, Python and the folder."""
    output = output.replace(platform.node(), "this-machine").replace(sys.executable, "python")
    return re.sub(r"/\S+/(?=mnist\.h5|ratings)", "data/", output)


@pytest.mark.parametrize(
    ("lesson_id", "mutant"),
    [
        pytest.param(name, x, marks=() if x.quick else full, id=f"{name}-{x.line.strip()}")
        for name, case in CASES.items()
        for x in [*case.mutants, *variants_of(name)]
    ],
)
def test_without_its_key_line_a_lesson_proves_nothing(
    lesson_id, mutant, tmp_path, tmp_path_factory
):
    ranks = 1 if CASES[lesson_id].ranks == 1 else mutant.ranks
    each = 2 if ranks == 4 and LESSONS[lesson_id]["nodes"] else ranks
    arguments = arguments_of(lesson_id, tmp_path_factory, mutant.options, ranks, tmp_path)
    file = write_mutant(tmp_path, lesson_id, (mutant.line, mutant.wrong))
    for _ in range(mutant.starts):
        status, output = run_ranks(ranks, file, *arguments, cwd=tmp_path, ranks_per_node=each)
    if mutant.says:
        assert_disproved(status, output, mutant.says)
    else:
        skip_what_cannot_run(status, output)
        assert proves(output_of((status, output))), output


@full
def test_accelerate_launch_starts_lesson_20_too(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    output = output_of(run([*command, ROOT / LESSONS["20"]["file"]], 200, tmp_path, None))
    assert "ranks: 1, device: cpu" in output
    assert proves(output), output


# A clock that shows a second more each time that it is read.
CLOCK = """import itertools, time as real, types
time = types.SimpleNamespace(sleep=real.sleep, perf_counter=itertools.count().__next__)
"""


@pytest.mark.parametrize("lesson_id", ["4", "6", "10"])
def test_images_of_all_ranks_count_and_the_model_is_replaced_by_a_whole_one(lesson_id, tmp_path):
    file = write_mutant(tmp_path, lesson_id, ("import time\n", CLOCK))
    model = tmp_path / "runs" / file.stem / "model.pt"
    model.parent.mkdir(parents=True)
    model.write_text("the run before")
    options = ("--epochs", 2, "--max-steps", 3, "--batch-size", 5)
    with model.open("rb") as before:
        output = output_of(run_ranks(2, file, *options, cwd=tmp_path))
        assert before.read() == b"the run before"  # not written over
    assert re.findall(r", (\S+) images/s", output) == ["30", "30"]
