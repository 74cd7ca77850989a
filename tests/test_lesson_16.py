"""Lesson 16: what each way of sending less costs, with bytes counted on a link of known speed."""

import re

import pytest
import torch
from helpers import (
    ALONE,
    LAUNCHER,
    LESSONS,
    ROOT,
    losses,
    proves,
    recorded_output,
    refusal,
    shape,
)
from mutants import assert_disproved, run_mutant
from ranks import run_ranks

LESSON = ROOT / LESSONS["16"]["file"]
WAYS = ["plain DDP", "accumulation", "bf16", "PowerSGD"]
PERIODS = {f"local SGD {steps}": steps for steps in (1, 8, 32)}
COLUMNS = ["given", "sent", "ms", "speed", "loss", "accuracy"]
SIZE = 3.266  # MB of gradients
FEW = ("--max-steps", 12, "--batch-size", 16)


def table(output):
    """Return the rows, {way: {column: number}}."""
    rows = {}
    for way, numbers in re.findall(r"^(\S+(?: \S+){0,2}) {2,}(\d[\d., ]+)%$", output, re.M):
        values = [float(x.replace(",", "")) for x in numbers.split()]
        rows[way] = dict(zip(COLUMNS, values, strict=True))
    assert list(rows) == [*WAYS, *PERIODS], output
    return rows


def assert_given(rows, steps=12):
    """Assert what is handed to all_reduce in each way: it does not depend on the ranks."""
    given = {way: row["given"] / SIZE for way, row in rows.items()}
    assert given["plain DDP"] == pytest.approx(1, abs=0.01)
    assert given["accumulation"] == pytest.approx(1 / 4, abs=0.01)
    assert given["bf16"] == pytest.approx(1 / 2, abs=0.01)
    # Two whole steps, then little.
    assert 2 / steps < given["PowerSGD"] < 2 / steps + 0.08
    for way, period in PERIODS.items():
        assert given[way] == pytest.approx(steps // period / steps, abs=0.01)
    for way in ("bf16", "PowerSGD"):
        assert rows[way]["loss"] == pytest.approx(rows["plain DDP"]["loss"], rel=0.02)


def test_on_a_slow_link_powersgd_is_faster_and_learns_as_well(slurm, tmp_path):
    assert slurm.call("link", "100mbit").returncode == 0
    try:
        done = slurm.run("salloc", "--nodes", 2, LAUNCHER, "16", *FEW, cwd=tmp_path)
    finally:
        assert slurm.call("link", "off").returncode == 0
    assert done.returncode == 0, done.stderr
    assert proves(done.stdout), done.stdout
    rows = table(done.stdout)
    assert_given(rows)
    # Two ranks in a ring send 2 (n - 1) / n = 1 times what they are given; besides, headers and
    # what was lost on the way and sent again.
    for way, row in rows.items():
        assert row["given"] <= row["sent"] <= 1.1 * row["given"] + 0.2, way
    # Here the link decides. 100 Mbit/s are 80 ms per MB.
    plain = rows["plain DDP"]
    assert plain["ms"] > 0.9 * 80 * SIZE
    assert rows["PowerSGD"]["speed"] > 1.5 * plain["speed"]
    assert rows["bf16"]["speed"] > 1.2 * plain["speed"]
    assert rows["local SGD 8"]["speed"] > 1.5 * plain["speed"]


def test_three_ranks(tmp_path):
    status, output = run_ranks(3, LESSON, "--max-steps", 20, "--batch-size", 16, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    rows = table(output)
    assert_given(rows, steps=20)
    # Others use lo too: no less than 4/3 of what is given, perhaps more.
    assert all(row["sent"] >= 4 / 3 * row["given"] - 0.01 for row in rows.values())
    curves = {way: losses(tmp_path / "runs" / LESSON.stem / way) for way in rows}
    for way, row in rows.items():
        assert curves[way][-1][0] == 20 * 16 * 3  # images
        last = [loss for _, loss in curves[way][-5:]]
        assert sum(last) / 5 == pytest.approx(row["loss"], abs=0.002)
    # The mean of parameters after each step is DDP's step, with momentum too, up to rounding.
    # With 8 steps between two means, the ranks have parted before the first one.
    plain, every, eighth = (
        torch.tensor([loss for _, loss in curves[way]])
        for way in ("plain DDP", "local SGD 1", "local SGD 8")
    )
    assert (every / plain - 1).abs().max() < 1e-5
    assert (eighth / plain - 1).abs()[:8].max() > 1e-3
    # What the launcher says is recorded too. The last line may name another way: see proves.
    mine, recorded = (
        text.partition("ranks: ")[2].partition("=> ")[0] for text in (output, recorded_output("16"))
    )
    assert shape(mine) == shape(recorded)


def test_one_rank_sends_nothing(tmp_path):
    status, output = run_ranks(1, LESSON, *FEW, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert_given(table(output))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--max-steps", 0), "greater than 0, not 0"),
        (("--batch-size", -8), "greater than 0, not -8"),
        (("--data-dir", "/nowhere"), "Restore it: git checkout data/MNIST"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    status, output = refusal("16", *arguments, env=ALONE | {"WORLD_SIZE": "4"})
    assert status == 2
    assert "error: argument --" in output.splitlines()[-1]
    assert output.splitlines()[-1].endswith(sentence)


@pytest.mark.mutation
def test_a_way_that_sends_less_but_learns_worse_is_wrong(tmp_path):
    line = ('if as_well and 0 < row["given"] < rows[best]["given"]', 'if way == "accumulation"')
    output = run_mutant("16", [line], 3, "--max-steps", 20, "--batch-size", 16, cwd=tmp_path)
    assert_disproved(output, r"^=> accumulation: 0.25 .* loss \+\d+\.\d% \(limit \+2%\): WRONG$")


@pytest.mark.mutation
def test_without_powersgd_and_no_sync_lesson_16_sends_as_much_as_before(tmp_path):
    lines = [
        ("start_powerSGD_iter=2", "start_powerSGD_iter=99"),
        ("nullcontext() if send else model.no_sync()", "nullcontext()"),
        ("            average_parameters(model)\n", "            pass\n"),
    ]
    output = run_mutant("16", lines, 1, *FEW, cwd=tmp_path)
    assert table(output)["accumulation"]["given"] == pytest.approx(SIZE, abs=0.01)
    assert table(output)["PowerSGD"]["given"] == pytest.approx(SIZE, abs=0.01)
    assert all(table(output)[way]["given"] == 0 for way in PERIODS)
    assert_disproved(output, r"^=> bf16: 0\.50 of plain DDP's bytes .*\(limit 0\.45\), .*WRONG$")
