"""Each lesson as a user runs it, at several numbers of processes, and what it must show."""

import argparse
import math
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from helpers import (
    ALONE,
    LESSONS,
    ROOT,
    load_lesson,
    losses,
    once,
    proof_of,
    proves,
    recorded_output,
    refusal,
    run_lesson,
    same_losses,
    shape,
)
from mutants import assert_disproved, run_mutant
from ranks import run_ranks

FEW = ("--epochs", 1, "--max-steps", 20)


def succeed(lesson_id, *arguments, cwd, quick=False):
    """Run a lesson that must end well and print what the README shows. Return its output.

    Quick: its ranks are started as ranks.py does, their number is the first of the arguments.
    """
    if quick:
        file = ROOT / LESSONS[lesson_id]["file"]
        status, output = run_ranks(arguments[0], file, *arguments, cwd=cwd)
    else:
        status, output = run_lesson(lesson_id, *arguments, cwd=cwd)
    assert status == 0, output
    assert "Traceback" not in output
    assert "Warning" not in output
    # The numbers are a run's own, the lines are not.
    assert shape(output) == shape(recorded_output(lesson_id))
    return output


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_0_sums_the_ranks(processes, tmp_path):
    output = succeed("0", processes, cwd=tmp_path, quick=processes < 4)
    total = sum(range(processes))
    rows = re.findall(
        r"^rank (\d+) of (\d+) \(process \d+\): (\d+) before, (\d+) after$", output, re.M
    )
    assert rows == [(str(r), str(processes), str(r), str(total)) for r in range(processes)]
    assert proof_of(output).endswith(f" is {total}: ok")
    assert proves(output)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_1_measures_bandwidth(processes, tmp_path):
    output = succeed("1", processes, cwd=tmp_path, quick=processes < 4)
    assert proves(output)
    assert len(re.findall(r"^rank \d+ of \d+ on \w+", output, re.M)) == processes
    row = r"([\d,.]+) ms \([\d.]+-[\d.]+\), +([\d,.]+) MB/s \(bus +([\d,.]+)\)"
    rows = re.findall(row, output)
    assert len(rows) == 3
    for size, row in zip((4e3, 1e6, 64e6), rows, strict=True):
        milliseconds, algorithm, bus = (float(x.replace(",", "")) for x in row)
        # The printed numbers are rounded, the short times most.
        assert algorithm == pytest.approx(size / milliseconds / 1e3, rel=0.05, abs=0.1)
        assert bus == pytest.approx(algorithm * 2 * (processes - 1) / processes, rel=0.01, abs=0.2)


def test_lesson_2_reaches_98_percent_with_its_defaults(tmp_path):
    output = succeed("2", cwd=tmp_path)
    assert proves(output)
    steps = [images for images, _ in losses(tmp_path / "runs" / "2_mnist_training")]
    assert len(steps) == 2 * 938
    assert steps[-1] == 2 * 938 * 64  # the last batch of an epoch is counted as a whole one


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process prints for 20 batches of 84 images, and the losses that it wrote."""

    def run():
        folder = tmp_path_factory.mktemp("alone")
        file = ROOT / LESSONS["2"]["file"]
        status, output = run_ranks(1, file, *FEW, "--batch-size", 84, cwd=folder)
        assert status == 0, output
        return output, losses(folder / "runs" / "2_mnist_training")

    return once(tmp_path_factory, "lesson_2_alone", run)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_3_gives_lesson_2s_loss_on_every_rank(processes, alone, tmp_path):
    few = (*FEW, "--batch-size", 84)
    output = succeed("3", processes, *few, cwd=tmp_path, quick=processes < 4)
    expected = float(re.search(r"mean loss ([\d.]+)", alone[0])[1])
    found = re.findall(r"^rank \d+: [\d.]+% .* mean loss ([\d.]+)$", output, re.M)
    assert len(found) == processes
    assert [float(loss) for loss in found] == pytest.approx([expected] * processes, abs=2e-4)
    images = processes * 20 * 84
    assert proof_of(output) == f"=> {processes} ranks, {images:,} images, 1 model (limit 1): ok"


@pytest.mark.parametrize("processes", [4, 7])  # 1, 2 and 3: in the chain below
def test_lesson_4_shares_the_images_and_equals_one_process(processes, tmp_path):
    few = ("--epochs", 2, "--max-steps", 10)  # 20 losses, of which 10 can be compared
    output = succeed("4", processes, *few, cwd=tmp_path, quick=processes > 4)
    assert proves(output)
    # Where 60,000 cannot be divided, the sampler visits a few images twice to fill up.
    twice = -60_000 % processes
    assert f"visited exactly once per epoch: {60_000 - twice:,} of 60,000 images" in output


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_5_says_where_the_time_goes(processes, tmp_path):
    output = succeed("5", processes, "--max-steps", 5, cwd=tmp_path, quick=processes < 4)
    assert proves(output)
    rows = re.findall(
        r"^ +\d+ +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%$", output, re.M
    )
    assert len(rows) == processes
    for row in rows:
        data, compute, communication, overlap, idle = map(float, row)
        assert compute > 0.1
        assert data > 0
        assert processes == 1 or communication > 0.1
        # Each microsecond is data, compute, communication, or idle; overlaps were counted twice.
        assert data + compute + communication - overlap + idle == pytest.approx(100, abs=1)
    row = r"^(?:without|with) averaging.*? ([\d.]+) +([\d,]+)$"
    found = re.findall(row, output, re.M)
    assert len(found) == 2
    for milliseconds, speed in found:
        images = float(speed.replace(",", "")) * float(milliseconds) / 1000
        assert images == pytest.approx(64 * processes, rel=0.05)
    traces = sorted((tmp_path / "log_ddp").glob("*.pt.trace.json"))
    assert [trace.name.split(".")[0] for trace in traces] == [f"rank{r}" for r in range(processes)]


@pytest.mark.parametrize("lesson_id", ["5", "test-profile"])
def test_an_older_trace_is_not_taken_for_that_of_this_run(lesson_id, tmp_path):
    folder = tmp_path / ("log_ddp" if lesson_id == "5" else "log")
    folder.mkdir()
    name = "rank0.9999999999999999999.pt.trace.json"  # the last one by name, and damaged
    (folder / name).write_text("an older trace")
    few = ("--max-steps", 5) if lesson_id == "5" else ()
    output = succeed(lesson_id, 2, *few, cwd=tmp_path, quick=True)
    assert proves(output)
    # And where the profiler has written none:
    lesson, older = load_lesson(lesson_id), set(folder.glob("*"))
    with (
        mock.patch.object(lesson.dist, "get_world_size", return_value=1),
        mock.patch.object(lesson.dist, "get_rank", return_value=0),
        pytest.raises(RuntimeError, match=r"^No trace was written to .*\. Is the disk full\?$"),
    ):
        lesson.report_shares(folder, older)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--batch-size", 4000, "--max-steps", 3),
            "8 steps (5 to warm up, 3 to record); with 4 x 4000 images a step there are 4: lower ",
        ),
        (("7", "--batch-size", 400), "25 steps (5 to warm up, 20 to record); with 7 x 400 images"),
    ],
)
def test_lesson_5_refuses_too_few_steps_to_profile(arguments, sentence):
    status, output = refusal("5", *arguments)
    assert status == 2
    assert f"error: the profiler needs {sentence}" in output


def test_lesson_5_counts_the_ranks_of_torchrun():
    few = ("--batch-size", 1250, "--max-steps", 1)
    status, output = refusal("5", *few, env=ALONE | {"WORLD_SIZE": "12"})
    assert status == 2
    assert "with 12 x 1250 images a step there are 4: " in output


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_6_gives_the_losses_of_lessons_2_and_4(processes, alone, tmp_path):
    """The equivalence chain: the same global batch, seed and order give the same losses."""
    batch = 84 // processes
    few = (processes, *FEW, "--batch-size", batch)
    manual = succeed("4", *few, cwd=tmp_path, quick=True)
    output = succeed("6", *few, cwd=tmp_path, quick=processes < 4)
    assert proves(manual)
    assert proves(output)
    first = r"epoch 0: loss ([\d.]+)"
    for other in (alone[0], manual):
        mine, theirs = float(re.search(first, output)[1]), float(re.search(first, other)[1])
        assert mine == pytest.approx(theirs, abs=2e-4)
    saved = re.search(r"^saved: (.*)$", output, re.M)[1]
    model = load_lesson("6").Net()
    model.load_state_dict(torch.load(tmp_path / saved))  # as the page says
    assert [path.name for path in (tmp_path / saved).parent.glob("model*")] == ["model.pt"]
    single = alone[1]
    ddp = losses(tmp_path / "runs" / "6_mnist_ddp_pt")
    assert len(single) == 20
    assert [x for x, _ in single] == [x for x, _ in ddp]
    assert same_losses([y for _, y in single], [y for _, y in ddp])


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_7_times_weak_and_strong_scaling(processes, tmp_path):
    few = (processes, "--rounds", 3, "--max-steps", 2, "--batch-size", 50)
    output = succeed("7", *few, cwd=tmp_path, quick=processes < 4)
    assert proves(output)
    share = 50 // processes
    whole = share * processes
    rows = timings(output)
    assert {name: sizes for name, *sizes in (row[:3] for row in rows)} == {
        "one process": [whole, whole],
        "one process, all cores": [whole, whole],
        "weak scaling": [whole, whole * processes],
        "strong scaling": [share, whole],
    }
    for _, _, batch, milliseconds, epoch, speed, median, lowest, highest in rows:
        assert epoch * speed == pytest.approx(60_000, rel=0.02)
        assert milliseconds * speed == pytest.approx(1000 * batch, rel=0.02)
        assert lowest <= median <= highest
    assert next(row for row in rows if row[0] == "one process")[-3:] == (1, 1, 1)
    gains = [f"{gain:.2f} ({low:.2f} to {high:.2f})" for *_, gain, low, high in rows[2:]]
    claim = f"=> {processes} processes: weak {gains[0]}, strong {gains[1]} times the images/s; "
    assert proof_of(output).startswith(claim)


@pytest.mark.parametrize("lesson_id", ["4", "6"])
def test_losses_that_are_not_finite_prove_nothing(lesson_id, tmp_path):
    """Both runs then come to NaN, after first losses that are equal."""
    file = ROOT / LESSONS[lesson_id]["file"]
    status, output = run_ranks(2, file, *FEW, "--lr", 1e30, cwd=tmp_path)
    assert status == 1, output
    assert_disproved(output, "losses within nan of one process")


def timings(output):
    """Return lesson 7's rows: [(setting, batch of a process, global batch, ms, ...), ...]."""
    row = r"^(\w.*?)" + r" +([\d,.]+)" * 6 + r" \(([\d.]+) to ([\d.]+)\)$"
    found = re.findall(row, output, re.M)
    return [(name, *(float(x.replace(",", "")) for x in numbers)) for name, *numbers in found]


@pytest.mark.parametrize(("max_steps", "images"), [(100, 1000), (3, 3 * 64)])
def test_lesson_7_counts_images_and_seconds(max_steps, images):
    """1,000 images are 16 batches of 64, of which the last is smaller."""
    lesson = load_lesson("7")
    pixels = torch.zeros(1000, 28, 28, dtype=torch.uint8)
    train_set = lesson.TensorDataset(pixels, torch.zeros(1000, dtype=torch.int64))
    args = argparse.Namespace(lr=0.01, seed=0, max_steps=max_steps)
    with (
        mock.patch.object(lesson.time, "perf_counter", side_effect=[100, 104]),
        mock.patch.object(lesson.dist, "get_rank", return_value=0),
    ):
        *_, speed = lesson.train(train_set, 1, 64, torch.device("cpu"), args)
    assert speed == images / 4


def gaps(output):
    return [int(gap) for gap in re.findall(r"(\d+)% \w+", proof_of(output))]


def test_lesson_8_scaling_brings_the_loss_curve_closer(tmp_path):
    output = succeed("8", 4, "--images", 9600, cwd=tmp_path)
    assert proves(output)
    unscaled, scaled = gaps(output)
    assert scaled < unscaled / 2
    folder = tmp_path / "runs" / "8_mnist_ddp_pt_lr"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    curves = [losses(folder / name) for name in ("alone", "unscaled", "linear")]
    assert [len(curve) for curve in curves] == [20, 20, 20]
    ratios = [[b / a for (_, a), (_, b) in zip(curves[0], c, strict=True)] for c in curves[1:]]
    assert max(ratios[0]) > max(1.5, max(ratios[1]) / 2)


@pytest.mark.parametrize(("processes", "scaling"), [(1, "linear"), (2, "linear"), (3, "sqrt")])
def test_lesson_8_runs_at_every_size(processes, scaling, tmp_path):
    few = ("--images", 3200 if processes == 2 else 1200, "--scaling", scaling)
    output = succeed("8", processes, *few, cwd=tmp_path, quick=True)
    assert proves(output)
    factor = processes if scaling == "linear" else processes**0.5
    row = f"{scaling}: global batch {8 * processes}, learning rate {0.00125 * factor:g}, mean loss"
    assert f"\n{row}" in output
    unscaled, scaled = gaps(output)
    if processes == 1:
        assert (unscaled, scaled) == (0, 0)
    elif processes == 2:
        assert scaled < 0.7 * unscaled


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_profile_job_hides_communication(processes, tmp_path):
    output = succeed("test-profile", processes, cwd=tmp_path, quick=processes < 4)
    assert proves(output)
    assert len(list((tmp_path / "log").glob("*.pt.trace.json"))) == processes
    if processes > 1:
        assert int(re.search(r"computing: (\d+)%", output)[1]) > 5


def test_torchrun_can_start_a_lesson_too(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [ROOT / LESSONS["4"]["file"], *map(str, FEW)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2," in done.stdout
    assert proves(done.stdout)


# For each lesson its key line, what stands there when somebody gets it wrong, and what the lesson
# says then.
SUM = "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n"
FLAT = "    dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n"
APART = r"losses within \de(-0[1-4]|\+\d\d) of one process \(limit 1e-05\)"
QUICK = (2, "--rounds", 1, "--max-steps", 1)  # of lesson 7
SCALED = ["8", "10"]  # of these the proof line shows two numbers: see below
MUTATIONS = [
    ("0", SUM, "", (2,), "every rank holds 0, 1; the sum 0\\+1 is 1"),
    ("0", "ReduceOp.SUM", "ReduceOp.MAX", (3,), "every rank holds 2; the sum 0\\+1\\+2 is 3"),
    ("1", SUM, "", (2,), "every rank holds 0, 1; the sum 0\\+1 is 1"),
    (
        "3",
        "torch.manual_seed(args.seed)",
        "torch.manual_seed(args.seed + dist.get_rank())",
        (2, *FEW),
        "=> 2 ranks, 2,560 images, 2 different models \\(limit 1\\)",
    ),
    ("4", "    flat /= dist.get_world_size()", "    pass", (2, *FEW), f"identical .*, {APART}"),
    ("4", FLAT, "", (2, *FEW), "parameters DIFFERENT on all ranks"),
    ("4", "(train_set, seed=", "(train_set, 1, 0, seed=", (2, *FEW), APART),
    ("5", FLAT, "", (2, "--max-steps", 5), "hidden by computing: nan% \\(limit 5%\\)"),
    (
        "6",
        "ddp_model = DistributedDataParallel(model)",
        "ddp_model = model",
        (2, *FEW),
        APART,
    ),
    ("7", "world_size, dist.get_rank(), seed=", "1, 0, seed=", QUICK, APART),
    ("7", "ddp_model = DistributedDataParallel(model)", "pass", QUICK, APART),
    (
        "test-profile",
        "DistributedDataParallel(model, bucket_cap_mb=1)",
        "model",
        (2,),
        "hidden by computing: nan%",
    ),
    ("9", SUM, "", (2,), "every rank holds 0, 1; the sum 0\\+1 is 1"),
    (
        "create_mnist_h5",
        """        file["images"][begin:end] = images  # goes to the disk""",
        """        # goes to the disk""",
        (1, "--file", "mnist.h5"),
        "NOT as written",
    ),
    (
        "create_mnist_h5",
        "range(0, count, len(images)):",
        "range(args.copies):",
        (1, "--file", "mnist.h5", "--copies", 2),
        "NOT as written",
    ),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("lesson_id", "line", "wrong", "arguments", "says"),
    MUTATIONS,
    ids=[f"{x[0]}-{i}" for i, x in enumerate(MUTATIONS)],
)
def test_without_its_key_line_a_lesson_proves_nothing(
    lesson_id, line, wrong, arguments, says, tmp_path
):
    output = run_mutant(lesson_id, [(line, wrong)], *arguments, cwd=tmp_path)
    assert_disproved(output, says)


@pytest.mark.mutation
def test_lesson_2_sees_that_nothing_is_learned(alone, tmp_path):
    few = (*FEW, "--batch-size", 84)
    output = run_mutant("2", [("        optimizer.step()\n", "")], 1, *few, cwd=tmp_path)
    assert_disproved(output, r"^=> (\d|1\d)\.\d\d% of 10,000 test images right \(limit 20%\)")
    right, wrong = (
        float(re.search(r"mean loss ([\d.]+)", proof_of(x))[1]) for x in (alone[0], output)
    )
    assert right < 2.29
    assert wrong == pytest.approx(math.log(10), abs=0.02)  # that of guessing


@pytest.mark.mutation
@pytest.mark.parametrize("lesson_id", SCALED)
def test_lessons_8_and_10_see_that_the_rate_is_not_scaled(lesson_id, tmp_path):
    """Otherwise the gap is smaller: see test_lesson_8_runs_at_every_size."""
    line = ("(world_size, args.lr * factor)", "(world_size, args.lr)")
    output = run_mutant(lesson_id, [line], 2, "--images", 3200, cwd=tmp_path)
    unscaled, scaled = gaps(output)
    assert scaled >= unscaled
    assert_disproved(output, "linear")
