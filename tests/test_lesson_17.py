"""Lesson 17: memory a rank when sharded, the same losses, a checkpoint for any number of ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers import (
    ALONE,
    LAUNCHER,
    LESSONS,
    ROOT,
    launch,
    losses,
    once,
    proof_of,
    proves,
    recorded_output,
    refusal,
    shape,
)
from ranks import run_ranks

LESSON = ROOT / LESSONS["17"]["file"]
STEM = LESSON.stem
KINDS = ("parameters", "gradients", "states", "inside")


def megabytes(name, output):
    """Return what the line of DDP, FSDP or resumed says, {kind: MB}."""
    row = re.search(
        rf"^{name}, MB a rank: parameters ([\d.]+), gradients ([\d.]+), Adam's states ([\d.]+); "
        r"inside a layer parameters ([\d.]+)",
        output,
        re.M,
    )
    return dict(zip(KINDS, map(float, row.groups()), strict=True))


def loss(name, epoch, output):
    return float(re.search(rf"^{name}, epoch {epoch}: loss ([\d.]+)", output, re.M)[1])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The output of 4 ranks, and the folder in which they left their checkpoint."""

    def run():
        folder = tmp_path_factory.mktemp("four")
        return *launch("--local", "2x2", "17", "--max-steps", 12, cwd=folder), str(folder)

    status, output, folder = once(tmp_path_factory, "four", run)
    assert status == 0, output
    return output, Path(folder)


def copy(folder, tmp_path):
    shutil.copytree(folder / "runs", tmp_path / "runs")


def test_four_ranks_hold_a_quarter_and_learn_the_same(four):
    output, folder = four
    assert proves("17", output), output
    assert "Warning" not in output
    # From here on the lesson speaks, not the launcher.
    mine, recorded = (text.partition("\nranks: ")[2] for text in (output, recorded_output("17")))
    assert shape(mine) == shape(recorded)
    whole, part = megabytes("DDP", output), megabytes("FSDP", output)
    for kind in ("parameters", "gradients", "states"):
        assert part[kind] <= 0.27 * whole[kind]
    assert part["parameters"] + part["states"] <= 0.35 * (whole["parameters"] + whole["states"])
    # A layer is whole in its turn, the others are not.
    assert 2 * part["parameters"] < part["inside"] < 0.7 * whole["inside"]
    assert loss("DDP", 0, output) == pytest.approx(loss("FSDP", 0, output), abs=1e-4)
    # It learns more than which characters are frequent.
    frequency = float(re.search(r"frequency alone: loss ([\d.]+)", output)[1])
    assert loss("FSDP", 1, output) < 0.8 * frequency
    curve = losses(folder / "runs" / STEM)
    assert [pieces for pieces, _ in curve] == [32 * (step + 1) for step in range(24)]
    checkpoint = folder / "runs" / STEM / "checkpoint"
    parts = sorted(checkpoint.glob("*.distcp"))
    assert len(parts) == 4  # each rank has written its own
    sizes = [file.stat().st_size for file in parts]
    assert max(sizes) < 1.5 * min(sizes)


def test_two_nodes_of_a_real_slurm_go_on_where_four_ranks_stopped(four, slurm, tmp_path):
    output, folder = four
    copy(folder, tmp_path)
    done = slurm.run("salloc", "--nodes", 2, LAUNCHER, "17", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nodes: node1 node2, ranks on each: 1, in all: 2" in done.stdout
    assert proof_of(done.stdout).startswith("=> 2 ranks go on where 4 stopped, losses within ")
    assert proves("17", done.stdout), done.stdout
    assert loss("resumed", 1, done.stdout) == pytest.approx(loss("FSDP", 1, output), abs=1e-4)
    half, quarter = megabytes("resumed", done.stdout), megabytes("FSDP", output)
    for kind in ("parameters", "gradients", "states"):
        assert half[kind] == pytest.approx(2 * quarter[kind], abs=0.02)


def test_one_rank_has_nobody_to_share_with(tmp_path):
    status, output = run_ranks(1, LESSON, "--max-steps", 2, cwd=tmp_path)
    assert status == 0, output
    assert proves("17", output), output
    assert "states 1.00 of DDP's" in output


def test_three_ranks_and_then_one(tmp_path):
    """Three do not divide the parameters, nor the pieces of text."""
    status, output = run_ranks(3, LESSON, "--max-steps", 3, "--batch-size", 2, cwd=tmp_path)
    assert status == 0, output
    assert proves("17", output), output
    assert "=> 3 ranks: parameters, gradients, Adam's states 0.34 of DDP's" in output
    status, output = run_ranks(1, LESSON, "--resume", cwd=tmp_path)
    assert status == 0, output
    assert proves("17", output), output
    assert proof_of(output).startswith("=> 1 ranks go on where 3 stopped")


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        (("--resume",), {}, f"runs/{STEM}/checkpoint holds no checkpoint: run the lesson without"),
        (("--resume",), {"WORLD_SIZE": "3"}, "32 pieces a step cannot be divided equally by 3"),
        (("--epochs", 0), {}, "epochs must be greater than 0, not 0"),
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


def mutant(folder, line, wrong):
    """Write the lesson with another line, under its own name: it finds its checkpoint by that."""
    text = LESSON.read_text()
    assert text.count(line) == 1
    file = folder / f"{STEM}.py"
    file.write_text(text.replace(line, wrong))
    return file


def test_a_gloo_that_does_not_average_is_refused(tmp_path):
    """That of older versions gives the sum, and Adam would hide that the gradients are wrong."""
    file = mutant(tmp_path, "torch.ones(world_size)", "2 * torch.ones(world_size)")
    status, output = run_ranks(1, file, cwd=tmp_path)
    assert status == 1
    assert "Traceback" not in output
    assert re.search(r"^torch \S+ cannot shard on CPUs: use a newer one, or GPUs$", output, re.M)


@pytest.mark.mutation
def test_without_sharding_lesson_17_proves_nothing(tmp_path):
    file = mutant(tmp_path, "        shard(model, text.device)\n", "        pass\n")
    status, output = run_ranks(2, file, "--max-steps", 2, cwd=tmp_path)
    assert status == 0, output
    assert "states 1.00 of DDP's" in proof_of(output)
    assert not proves("17", output)


@pytest.mark.mutation
def test_weights_without_adams_states_do_not_go_on_where_they_stopped(four, tmp_path):
    copy(four[1], tmp_path)
    line = '    dcp.load({"model": weights, "optimizer": states}'
    file = mutant(tmp_path, line, '    dcp.load({"model": weights}')
    status, output = run_ranks(1, file, "--resume", cwd=tmp_path)
    assert status == 0, output
    assert proof_of(output).startswith("=> 1 ranks go on where 4 stopped")
    assert not proves("17", output)
