"""Each lesson as a user runs it, at several numbers of processes, and what it must show."""

import math
import re
import subprocess
import sys

import pytest
from helpers import LESSONS, ROOT, losses, proof_of, proves, recorded_output, run_lesson, shape
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
    output = succeed("0", processes, cwd=tmp_path)
    total = sum(range(processes))
    rows = re.findall(
        r"^rank (\d+) of (\d+) \(process \d+\): (\d+) before, (\d+) after$", output, re.M
    )
    assert rows == [(str(r), str(processes), str(r), str(total)) for r in range(processes)]
    assert proof_of(output).endswith(f"= {total}")
    assert proves("0", output)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_1_measures_bandwidth(processes, tmp_path):
    output = succeed("1", processes, cwd=tmp_path)
    assert proves("1", output)
    assert len(re.findall(r"^rank \d+ of \d+ on \w+", output, re.M)) == processes
    rows = re.findall(r"([\d,.]+) ms, +([\d,.]+) MB/s, bus +([\d,.]+) MB/s", output)
    assert len(rows) == 3
    for size, row in zip((4e3, 1e6, 64e6), rows, strict=True):
        milliseconds, algorithm, bus = (float(x.replace(",", "")) for x in row)
        # The printed numbers are rounded, the short times most.
        assert algorithm == pytest.approx(size / milliseconds / 1e3, rel=0.05, abs=0.1)
        assert bus == pytest.approx(algorithm * 2 * (processes - 1) / processes, rel=0.01, abs=0.2)


def test_lesson_2_reaches_98_percent_with_its_defaults(tmp_path):
    output = succeed("2", cwd=tmp_path)
    assert proves("2", output)
    steps = [images for images, _ in losses(tmp_path / "runs" / "2_mnist_training")]
    assert len(steps) == 2 * 938
    assert steps[-1] == 120_000


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process prints for 20 batches of 84 images, and the losses that it wrote."""
    folder = tmp_path_factory.mktemp("alone")
    status, output = run_ranks(1, ROOT / LESSONS["2"]["file"], *FEW, "--batch-size", 84, cwd=folder)
    assert status == 0, output
    return output, losses(folder / "runs" / "2_mnist_training")


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_3_gives_lesson_2s_loss_on_every_rank(processes, alone, tmp_path):
    few = (*FEW, "--batch-size", 84)
    output = succeed("3", processes, *few, cwd=tmp_path, quick=processes < 4)
    expected = float(re.search(r"mean loss ([\d.]+)", alone[0])[1])
    found = re.findall(r"^rank \d+: [\d.]+% .* mean loss ([\d.]+)$", output, re.M)
    assert len(found) == processes
    assert [float(loss) for loss in found] == pytest.approx([expected] * processes, abs=1e-4)
    assert proof_of(output) == f"=> {processes} ranks, {processes * 20 * 84:,} images, one model"
    assert proves("3", output)


@pytest.mark.parametrize("processes", [4, 7])  # 1, 2 and 3: in the chain below
def test_lesson_4_shares_the_images_and_equals_one_process(processes, tmp_path):
    few = ("--epochs", 2, "--max-steps", 20)
    output = succeed("4", processes, *few, cwd=tmp_path, quick=processes > 4)
    assert proves("4", output)
    # Where 60,000 cannot be divided, the sampler visits a few images twice to fill up.
    twice = -60_000 % processes
    assert f"visited exactly once an epoch: {60_000 - twice:,} of 60,000 images" in output


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_5_says_where_the_time_goes(processes, tmp_path):
    output = succeed("5", processes, "--max-steps", 5, cwd=tmp_path, quick=processes < 4)
    assert proves("5", output)
    rows = re.findall(
        r"^ +\d+ +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%$", output, re.M
    )
    assert len(rows) == processes
    for row in rows:
        data, compute, communication, overlap, idle = map(float, row)
        assert compute > 10
        assert data > 0
        assert processes == 1 or communication > 0.1
        # Each microsecond is data, compute, communication, or idle; overlaps were counted twice.
        assert data + compute + communication - overlap + idle == pytest.approx(100, abs=1)
    traces = sorted((tmp_path / "log_ddp").glob("*.pt.trace.json"))
    assert [trace.name.split(".")[0] for trace in traces] == [f"rank{r}" for r in range(processes)]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_6_gives_the_losses_of_lessons_2_and_4(processes, alone, tmp_path):
    """The equivalence chain: the same global batch, seed and order give the same losses."""
    batch = 84 // processes
    few = (processes, *FEW, "--batch-size", batch)
    manual = succeed("4", *few, cwd=tmp_path, quick=True)
    output = succeed("6", *few, cwd=tmp_path, quick=processes < 4)
    assert proves("4", manual)
    assert proves("6", output)
    first = r"epoch 0: loss ([\d.]+)"
    for other in (alone[0], manual):
        mine, theirs = float(re.search(first, output)[1]), float(re.search(first, other)[1])
        assert mine == pytest.approx(theirs, abs=1e-4)
    single = alone[1]
    ddp = losses(tmp_path / "runs" / "6_mnist_ddp_pt")
    assert len(single) == 20
    assert [x for x, _ in single] == [x for x, _ in ddp]
    assert [y for _, y in single] == pytest.approx([y for _, y in ddp], abs=1e-5)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_lesson_7_times_the_same_work_twice(processes, tmp_path):
    arguments = (processes, *FEW, "--batch-size", 200)
    output = succeed("7", *arguments, cwd=tmp_path, quick=processes < 4)
    assert proves("7", output)
    rows = timings(output)
    assert [ranks for ranks, *_ in rows] == sorted({1, processes})
    for ranks, _, seconds, rate in rows:
        assert seconds * rate == pytest.approx(ranks * 20 * 200, rel=0.03, abs=0.01 * rate)
    gain = float(re.search(r"([\d.]+) times", output)[1])
    assert gain == pytest.approx(rows[-1][3] / rows[0][3], abs=0.02)
    # Several ranks see more images in 20 steps, and so learn something else.
    assert (rows[0][1] == rows[-1][1]) == (processes == 1)


def timings(output):
    """Return lesson 7's rows: [(processes, loss, seconds, images/s), ...]."""
    pattern = r"^processes: (\d+), loss ([\d.]+), ([\d.]+) s, ([\d,]+) images/s$"
    rows = re.findall(pattern, output, re.M)
    return [(int(n), float(x), float(s), float(rate.replace(",", ""))) for n, x, s, rate in rows]


def gaps(output):
    return [int(gap) for gap in re.findall(r"(\d+)%", proof_of(output))]


def test_lesson_8_scaling_brings_the_loss_curve_closer(tmp_path):
    output = succeed("8", 4, "--max-steps", 150, cwd=tmp_path)
    assert proves("8", output)
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
    few = ("--max-steps", 20, "--scaling", scaling)
    output = succeed("8", processes, *few, cwd=tmp_path, quick=True)
    assert proves("8", output)
    factor = processes if scaling == "linear" else processes**0.5
    row = f"{scaling}: global batch {64 * processes}, learning rate {0.005 * factor:g}, mean loss"
    assert f"\n{row}" in output
    if processes == 1:
        assert gaps(output) == [0, 0]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_profile_job_hides_communication(processes, tmp_path):
    output = succeed("test-profile", processes, cwd=tmp_path, quick=processes < 4)
    assert proves("test-profile", output)
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
    assert proves("4", done.stdout)


# For each lesson its key line, and what stands there when somebody gets it wrong.
MUTATIONS = [
    ("0", "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n", "", (2,)),
    ("1", "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n", "", (2,)),
    (
        "3",
        "torch.manual_seed(args.seed)",
        "torch.manual_seed(args.seed + dist.get_rank())",
        (2, *FEW),
    ),
    ("4", "flat / world_size, gradients", "flat, gradients", (2, *FEW)),
    ("4", "    dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n", "", (2, *FEW)),
    ("6", "        model = DistributedDataParallel(model)", "        pass", (2, *FEW)),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("lesson_id", "line", "wrong", "arguments"), MUTATIONS)
def test_without_its_key_line_a_lesson_proves_nothing(lesson_id, line, wrong, arguments, tmp_path):
    output = run_mutant(lesson_id, line, wrong, arguments, tmp_path)
    assert not proves(lesson_id, output), output


def run_mutant(lesson_id, line, wrong, arguments, tmp_path):
    """Run a lesson with one line replaced. Return what it printed."""
    text = (ROOT / LESSONS[lesson_id]["file"]).read_text()
    assert text.count(line) == 1
    mutant = tmp_path / "mutant.py"
    mutant.write_text(text.replace(line, wrong))
    if "--data-dir" in text:
        arguments = (*arguments, "--data-dir", ROOT / "data")
    ranks = 1 if lesson_id == "2" else arguments[0]
    return run_ranks(ranks, mutant, *arguments, cwd=tmp_path)[1]


@pytest.mark.mutation
def test_lesson_2_sees_that_nothing_is_learned(alone, tmp_path):
    few = (*FEW, "--batch-size", 84)
    output = run_mutant("2", "        optimizer.step()\n", "", few, tmp_path)
    right, wrong = (float(re.search(r"mean loss ([\d.]+)", x)[1]) for x in (alone[0], output))
    assert right < 2.29
    assert wrong == pytest.approx(math.log(10), abs=0.02)  # that of guessing


@pytest.mark.mutation
def test_lesson_5_sees_that_nothing_is_sent(tmp_path):
    line = "    dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n"
    output = run_mutant("5", line, "", (2, "--max-steps", 5), tmp_path)
    shares = re.findall(r"^ +\d+ +[\d.]+% +[\d.]+% +([\d.]+)%", output, re.M)
    assert shares == ["0.0", "0.0"]


@pytest.mark.mutation
def test_lesson_7_sees_that_the_work_is_not_shared(tmp_path):
    line, wrong = "(images, world_size, rank, seed=", "(images, 1, 0, seed="
    output = run_mutant("7", line, wrong, (2, *FEW), tmp_path)
    # Both ranks take the batches that one process took, and learn what it learned.
    (_, alone, *_), (_, together, *_) = timings(output)
    assert alone == together


@pytest.mark.mutation
def test_lesson_8_sees_that_the_rate_is_not_scaled(tmp_path):
    few = (2, "--max-steps", 50)
    output = run_mutant("8", "lr=args.lr * factor", "lr=args.lr", few, tmp_path)
    unscaled, scaled = gaps(output)
    assert scaled >= unscaled


@pytest.mark.mutation
def test_profile_job_sees_that_nothing_is_sent(tmp_path):
    line = "DistributedDataParallel(Net().to(device), bucket_cap_mb=1)"
    output = run_mutant("test-profile", line, "Net().to(device)", (2,), tmp_path)
    assert proof_of(output).endswith("computing: 0%")
