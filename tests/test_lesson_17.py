"""Lesson 17: memory a rank when sharded, the same losses, a checkpoint for any number of ranks."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import ranks
import torch
from helpers import (
    ALONE,
    LAUNCHER,
    LESSONS,
    ROOT,
    cannot,
    launch,
    losses,
    once,
    proof_of,
    proves,
    recorded_output,
    refusal,
    shape,
)
from mutants import assert_disproved, run_mutant, write_mutant

LESSON = ROOT / LESSONS["17"]["file"]
STEM = LESSON.stem
KINDS = ("parameters", "gradients", "states", "inside")


def megabytes(name, output):
    """Return what the line of DDP or FSDP says, {kind: MB}."""
    row = re.search(
        rf"^{name}, MB a rank: parameters ([\d.]+), gradients ([\d.]+), Adam's states ([\d.]+); "
        r"inside a layer parameters ([\d.]+)",
        output,
        re.M,
    )
    return dict(zip(KINDS, map(float, row.groups()), strict=True))


def loss(name, epoch, output):
    return float(re.search(rf"^{name}, epoch {epoch}: loss ([\d.]+)", output, re.M)[1])


SENTENCE = r"^torch \S+ cannot shard on CPUs: use a newer one, or GPUs$"


def run_ranks(*arguments, **options):
    """As ranks.run_ranks; skip where this version of PyTorch cannot run the lesson."""
    return unless_it_cannot(*ranks.run_ranks(*arguments, **options))


def unless_it_cannot(status, output):
    """Return what a run of the lesson gave; skip with its sentence if that is its result."""
    if status == os.EX_UNAVAILABLE:
        # gloo has averaged since torch 2.8: only an older one may refuse.
        skip = pytest.skip if torch.__version__ < (2, 8) else cannot
        skip(re.search(SENTENCE, output, re.M)[0])
    return status, output


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The output of 4 ranks, and the folder in which they left their checkpoint."""

    def run():
        folder = tmp_path_factory.mktemp("four")
        return *launch("--local", "2x2", "17", "--max-steps", 12, cwd=folder), str(folder)

    status, output, folder = once(tmp_path_factory, "four", run)
    unless_it_cannot(status, output)
    assert status == 0, output
    return output, Path(folder)


def copy(folder, tmp_path):
    shutil.copytree(folder / "runs", tmp_path / "runs")


def test_four_ranks_hold_a_quarter_and_learn_the_same(four):
    output, folder = four
    assert proves(output), output
    assert "Warning" not in output
    whole, part = megabytes("DDP", output), megabytes("FSDP", output)
    for kind in ("parameters", "gradients", "states"):
        assert part[kind] <= 0.27 * whole[kind]
    assert part["parameters"] + part["states"] <= 0.35 * (whole["parameters"] + whole["states"])
    # A layer is whole in its turn, the others are not.
    assert 2 * part["parameters"] < part["inside"] < 0.7 * whole["inside"]
    assert loss("DDP", 0, output) == pytest.approx(loss("FSDP", 0, output), abs=2e-4)
    # It learns more than which characters are frequent.
    frequency = float(re.search(r"by frequency alone: loss ([\d.]+)", output)[1])
    assert loss("FSDP", 1, output) < 0.8 * frequency
    assert float(re.search(r"test accuracy: ([\d.]+)% of the next characters", output)[1]) > 40
    curve = losses(folder / "runs" / STEM)
    assert [pieces for pieces, _ in curve] == [32 * (step + 1) for step in range(24)]
    checkpoint = folder / "runs" / STEM / "checkpoint"
    parts = sorted(checkpoint.glob("*.distcp"))
    assert len(parts) == 4  # each rank has written its own
    sizes = [file.stat().st_size for file in parts]
    assert max(sizes) < 1.5 * min(sizes)
    # From here on the lesson speaks, not the launcher.
    mine, recorded = (text.partition("\nranks: ")[2] for text in (output, recorded_output("17")))
    assert shape(mine) == shape(recorded)


def test_two_nodes_of_a_real_slurm_go_on_where_four_ranks_stopped(four, slurm, tmp_path):
    output, folder = four
    copy(folder, tmp_path)
    done = slurm.run("salloc", "--nodes", 2, LAUNCHER, "17", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nodes: node1 node2, ranks on each: 1, in all: 2" in done.stdout
    assert proof_of(done.stdout).startswith("=> 2 ranks go on where 4 stopped, losses within ")
    assert proves(done.stdout), done.stdout
    assert loss("resumed", 1, done.stdout) == pytest.approx(loss("FSDP", 1, output), abs=2e-4)
    half, quarter = megabytes("FSDP", done.stdout), megabytes("FSDP", output)
    for kind in ("parameters", "gradients", "states"):
        assert half[kind] == pytest.approx(2 * quarter[kind], abs=0.02)


def test_one_rank_has_nobody_to_share_with(tmp_path):
    status, output = run_ranks(1, LESSON, "--max-steps", 2, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert "states 1.00 of DDP's" in output


def test_three_ranks_and_then_one(tmp_path):
    """Three do not divide the parameters, nor the pieces of text."""
    status, output = run_ranks(3, LESSON, "--max-steps", 3, "--batch-size", 2, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert "=> 3 ranks: parameters, gradients, Adam's states 0.34 of DDP's (limit 0.38)" in output
    status, output = run_ranks(1, LESSON, "--resume", cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert proof_of(output).startswith("=> 1 ranks go on where 3 stopped")


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        (("--resume",), {}, f"runs/{STEM}/checkpoint holds no checkpoint: run the lesson without"),
        (("--resume",), {"WORLD_SIZE": "3"}, "32 pieces a step cannot be divided evenly by 3"),
        (("--epochs", 0), {}, "argument --epochs: must be "),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, env, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if env:
        notes = tmp_path / "runs" / STEM / "checkpoint" / "notes.json"
        notes.parent.mkdir(parents=True)
        notes.write_text(json.dumps({"batch": 32}))
    status, output = refusal("17", *arguments, env=ALONE | env)
    assert status == 2
    assert f"error: {sentence}" in output.strip().splitlines()[-1]


def test_a_gloo_that_does_not_average_is_refused(tmp_path):
    """That of older versions gives the sum, and Adam would hide that the gradients are wrong."""
    newer = ('hasattr(FSDPModule, "set_force_sum_reduction_for_comms")', "False")
    file = write_mutant(tmp_path, "17", newer)
    status, output = ranks.run_ranks(2, file, cwd=tmp_path)
    assert status == os.EX_UNAVAILABLE
    assert "Traceback" not in output
    assert len(re.findall(SENTENCE, output, re.M)) == 1


@pytest.mark.mutation
def test_without_sharding_lesson_17_proves_nothing(tmp_path):
    line = ("    shard(model, device)\n", "")
    output = run_mutant("17", [line], 2, "--max-steps", 2, cwd=tmp_path)
    assert_disproved(output, r"states 1\.00 of DDP's \(limit 0\.55\), .*: WRONG$")


@pytest.mark.mutation
def test_weights_without_adams_states_do_not_go_on_where_they_stopped(four, tmp_path):
    copy(four[1], tmp_path)
    line = '    dcp.load({"model": weights, "optimizer": states}'
    wrong = '    dcp.load({"model": weights}'
    output = run_mutant("17", [(line, wrong)], 1, "--resume", cwd=tmp_path)
    says = r"^=> 1 ranks go on where 4 stopped, losses within \S+ \(limit 1e-05\): WRONG$"
    assert_disproved(output, says)
