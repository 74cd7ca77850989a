"""Every lesson as a user runs it, the chain of equal losses, and lessons without their key line.

A new lesson needs a line in SHORT, and one in MUTANTS, here or in the file with its other tests.
"""

import os
import platform
import re
import sys
import time

import pytest
from helpers import (
    LESSONS,
    ROOT,
    launch,
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
from lesson_numbers import NUMBERS
from mutants import assert_disproved, run_mutant, write_mutant
from ranks import FORKS, run_ranks

full = pytest.mark.full

# ---------------------------------------------------------------- each lesson, short

FEW = "--epochs 1 --max-steps 20"
# What makes a lesson short, and still lets its proof line say ok. {folder} is the test's own.
SHORT = {
    "0": "",
    "1": "",
    "2": "",  # its defaults: the page promises 98%
    "3": FEW,
    "4": FEW,
    "5": "--max-steps 5",
    "6": FEW,
    "test-profile": "",
    "7": "--rounds 1 --max-steps 2 --batch-size 50",
    "8": "--images 3200",
    "9": "",
    "10": "--images 3200",
    "create_mnist_h5": "--file {folder}/mnist.h5",
    "11": "--file {folder}/mnist.h5 --epochs 1 --max-steps 5",
    "12": "--images 1280 --batch-size 32 --save-every 4 --crash-at-step 6",
    "13": "--epochs 2 --max-steps 6 --warm-up 4",
    "create_ratings": "--folder {folder}/ratings --copies 3 --files 12",
    "14": "--folder {folder}/ratings --epochs 1 --batch-size 504 --lr 0.03",
    "15": "",
    "16": "--max-steps 20 --batch-size 16",
    "17": "--max-steps 12",
    "18": "",
}
ONE_PROCESS = ("2", "create_mnist_h5", "create_ratings")
READS = {"11": "create_mnist_h5", "14": "create_ratings"}  # what another lesson has written
# What is a warning on one version of PyTorch is an error on a later one.
NO_WARNINGS = {"PYTHONWARNINGS": "error::FutureWarning,error::UserWarning"}
# A torch that was built without CUDA: the stand-in answers for it.
NO_CUDA = {"PYTHONPATH": str(ROOT / "tests" / "gpu"), "STANDIN_KIND": "none"}


def arguments_of(lesson_id, folder):
    """Return what makes a lesson short, as a list. What it reads has been written then."""
    if lesson_id in READS:
        creator = READS[lesson_id]
        file = ROOT / LESSONS[creator]["file"]
        status, output = run_ranks(1, file, *arguments_of(creator, folder), cwd=folder)
        assert status == 0, output
    return SHORT[lesson_id].format(folder=folder).split()


def run_short(lesson_id, ranks, folder, env):
    """Run a lesson as its page says; return (exit status, output).

    Each rank of Day 2 is on an imitated node of its own. Four are on two nodes.
    """
    lesson = LESSONS[lesson_id]
    arguments = arguments_of(lesson_id, folder)
    if lesson.get("nodes"):
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
        ranks = 4 if lesson_id in ("9", "10", "18") else 2
        if lesson_id in ONE_PROCESS:
            ranks = 1
        runs.append((lesson_id, ranks, {}, pytest.mark.short))
        if lesson_id not in ONE_PROCESS:
            runs.append((lesson_id, 1, {}, full))
            runs.append((lesson_id, 3, NO_CUDA, full))
    runs.append(("4", 7, {}, full))  # 7 does not divide 60,000
    return [pytest.param(*run, marks=mark, id=f"{run[0]}-{run[1]}") for *run, mark in runs]


@pytest.mark.parametrize(("lesson_id", "ranks", "env"), quick_and_full())
def test_a_lesson_runs_as_its_page_says(lesson_id, ranks, env, tmp_path):
    status, output = run_short(lesson_id, ranks, tmp_path, env | NO_WARNINGS)
    if "cannot shard on CPUs" in output:
        pytest.skip("this torch cannot run lesson 17 on CPUs")
    assert status == 0, output
    assert proves(output), output
    assert "Traceback" not in output
    assert "Warning" not in output  # of PyTorch's C++, too
    as_on_page = ranks in (2, 4) or lesson_id in ONE_PROCESS  # others lack a row of a pair, ...
    if as_on_page and "TEST_WITH_GPUS" not in os.environ:  # the pages show what CPUs print
        printed = kinds_of_lines(as_recorded(output, tmp_path))
        assert printed == kinds_of_lines(recorded_output(lesson_id))
    if lesson_id in NUMBERS:
        NUMBERS[lesson_id](output, ranks, tmp_path)


def as_recorded(output, folder):
    """Return an output with the names of the pages: of the machine, Python and the folder."""
    output = output.replace(platform.node(), "this-machine")
    return output.replace(sys.executable, "python").replace(f"{folder}/", "data/")


def kinds_of_lines(output):
    """Return the kinds of lines before the proof, whose words may depend on its numbers.

    What torchrun logs when it restarts a job does not count.
    """
    lines = shape(output.rpartition("=> ")[0])
    return {line for line in lines if not re.match(r"[WE]#", line)}


@full
@pytest.mark.parametrize(("lesson_id", "log"), [("5", "log_ddp"), ("test-profile", "log")])
def test_an_older_trace_is_not_taken_for_that_of_this_run(lesson_id, log, tmp_path):
    older = tmp_path / log / "rank0.9999999999999999999.pt.trace.json"  # the last one by name
    older.parent.mkdir()
    older.write_text("damaged")
    file = ROOT / LESSONS[lesson_id]["file"]
    status, output = run_ranks(2, file, *SHORT[lesson_id].split(), cwd=tmp_path)
    assert status == 0, output


def test_lesson_5_refuses_too_few_steps_to_profile():
    status, said = refusal("5", "7", "--batch-size", 400)
    assert status == 2
    assert "error: the profiler needs 25 steps (5 to warm up, 20 to record); with 7 x 400" in said


# ---------------------------------------------------------------- the chain of equal losses

# Lessons that train on the same global batches of 84 images as lesson 2: their options, and how
# many of its losses they give. {share} is a rank's part of a batch. 84 = 3 x 4 x 7.
CHAIN = {
    "4": (f"{FEW} --batch-size {{share}}", 20),
    "5": ("--max-steps 15 --batch-size {share}", 20),  # and 5 steps to warm up
    "6": (f"{FEW} --batch-size {{share}}", 20),
    # Ten steps to warm up; then it begins the next epoch.
    "7": ("--rounds 1 --max-steps 1 --batch-size 84", 10),
}


def train_alone(tmp_path_factory, batch_size):
    """Return what lesson 2 prints in 20 steps with this batch size, and their losses."""

    def run():
        folder = tmp_path_factory.mktemp("alone")
        arguments = (*FEW.split(), "--batch-size", batch_size)
        output = run_ranks(1, ROOT / LESSONS["2"]["file"], *arguments, cwd=folder)[1]
        assert "\n=> " in output, output  # 20 steps may be too few for its limit
        return output, losses(folder / "runs" / "2_mnist_training")

    return once(tmp_path_factory, f"alone_{batch_size}", run)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=full) for n in (1, 2, 4, 7))])
@pytest.mark.parametrize("lesson_id", CHAIN)
def test_ranks_that_share_a_batch_have_the_losses_of_one(
    lesson_id, ranks, tmp_path_factory, tmp_path
):
    options, steps = CHAIN[lesson_id]
    arguments = options.format(share=84 // ranks).split()
    file = ROOT / LESSONS[lesson_id]["file"]
    status, output = run_ranks(ranks, file, *arguments, cwd=tmp_path)
    assert status == 0, output
    alone = train_alone(tmp_path_factory, 84)[1][:steps]
    shared = losses(tmp_path / "runs" / file.stem)[:steps]
    assert [images for images, _ in shared] == [images for images, _ in alone]
    assert same_losses([loss for _, loss in shared], [loss for _, loss in alone])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=full)])
def test_each_rank_of_lesson_3_has_lesson_2s_loss(ranks, tmp_path_factory, tmp_path):
    arguments = (*FEW.split(), "--batch-size", 84)
    status, output = run_ranks(ranks, ROOT / LESSONS["3"]["file"], *arguments, cwd=tmp_path)
    assert status == 0, output
    printed = r"mean loss ([\d.]+)"
    alone = float(re.search(printed, train_alone(tmp_path_factory, 84)[0])[1])
    found = re.findall(rf"^rank \d+: .* {printed}$", output, re.M)
    assert [float(loss) for loss in found] == pytest.approx([alone] * ranks, abs=2e-4)
    claim = f"=> {ranks} ranks, {ranks * 20 * 84:,} images, 1 model (limit 1): ok"
    assert proof_of(output) == claim


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=full)])
def test_lesson_10_has_the_losses_of_lesson_2(ranks, tmp_path_factory, tmp_path):
    """20 steps are the epoch: each of the 20 points of lesson 10's curves is then one step."""
    file = ROOT / LESSONS["10"]["file"]
    arguments = ("--images", 60_000, "--batch-size", 3000 // ranks, "--lr", 0.015)
    output = run_ranks(ranks, file, *arguments, cwd=tmp_path)[1]
    assert "\n=> " in output, output  # so large a batch may miss the limit of its gap
    alone = train_alone(tmp_path_factory, 3000)[1]
    shared = losses(tmp_path / "runs" / file.stem / "unscaled")
    assert [images for images, _ in shared] == [images for images, _ in alone]
    assert same_losses([loss for _, loss in shared], [loss for _, loss in alone])


# ---------------------------------------------------------------- without the key line

SUM = "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n"
FLAT = "    dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n"
NO_SUM = "every rank holds 0, 1; the sum 0\\+1 is 1: WRONG"
APART = r"losses within \de(-0[1-4]|\+\d\d) of one process \(limit 1e-05\): WRONG"
NOT_SCALED = [
    ("(world_size, args.lr * factor)", "(world_size, args.lr)", r"linear \(limit \d+%\): WRONG")
]
# For each lesson its key line, what stands there when somebody gets it wrong, and what the proof
# line says then. The first one of each lesson is in the quick suite.
MUTANTS = {
    "0": [(SUM, "", NO_SUM), ("ReduceOp.SUM", "ReduceOp.MIN", "holds 0; the sum 0\\+1 is 1")],
    "1": [(SUM, "", NO_SUM)],
    "2": [
        ("        optimizer.step()\n", "", r"=> (\d|1\d)\.\d\d% of .* \(limit \d\d%\), .*: WRONG")
    ],
    "3": [
        (
            "torch.manual_seed(args.seed)",
            "torch.manual_seed(args.seed + dist.get_rank())",
            r"=> 2 ranks, 2,560 images, 2 different models \(limit 1\): WRONG",
        )
    ],
    "4": [
        ("    flat /= dist.get_world_size()", "    pass", f"identical .*, {APART}"),
        (FLAT, "", "parameters DIFFERENT on all ranks"),
        ("(train_set, seed=", "(train_set, 1, 0, seed=", APART),
    ],
    "5": [(FLAT, "", r"hidden by computing: nan% \(limit 5%\): WRONG")],
    "6": [("ddp_model = DistributedDataParallel(model)", "ddp_model = model", APART)],
    "test-profile": [
        ("DistributedDataParallel(model, bucket_cap_mb=1)", "model", "hidden by computing: nan%")
    ],
    "7": [
        ("ddp_model = DistributedDataParallel(model)", "pass", APART),
        ("world_size, dist.get_rank(), seed=", "1, 0, seed=", APART),
    ],
    "8": NOT_SCALED,
    "9": [(SUM, "", NO_SUM)],
    "10": NOT_SCALED,
    "create_mnist_h5": [
        ('file["images"][begin:end] = images  # goes', "# goes", "read NOT as written: WRONG")
    ],
}


def quick_and_full_mutants():
    """Return each lesson with a line, what is there instead, and what the lesson says then."""
    return [
        pytest.param(lesson_id, *mutant, marks=[full] * (place > 0), id=f"{lesson_id}-{place}")
        for lesson_id, mutants in MUTANTS.items()
        for place, mutant in enumerate(mutants)
    ]


@pytest.mark.mutation
@pytest.mark.parametrize(("lesson_id", "line", "wrong", "says"), quick_and_full_mutants())
def test_without_its_key_line_a_lesson_proves_nothing(lesson_id, line, wrong, says, tmp_path):
    ranks = 1 if lesson_id in ONE_PROCESS else 2
    arguments = arguments_of(lesson_id, tmp_path)
    output = run_mutant(lesson_id, [(line, wrong)], ranks, *arguments, cwd=tmp_path)
    assert_disproved(output, says)


@full
@pytest.mark.parametrize("lesson_id", ["4", "6"])
def test_losses_that_are_not_finite_prove_nothing(lesson_id, tmp_path):
    """Both runs then come to NaN, after first losses that are equal."""
    file = ROOT / LESSONS[lesson_id]["file"]
    status, output = run_ranks(2, file, *FEW.split(), "--lr", 1e30, cwd=tmp_path)
    assert status == 1, output
    assert_disproved(output, "losses within nan of one process")


# ---------------------------------------------------------------- the end of a job


@pytest.mark.parametrize("lesson_id", ["1", pytest.param("15", marks=full)])
def test_a_rank_that_never_comes_ends_the_others_after_dist_timeout(lesson_id, tmp_path):
    before = {
        "1": "    # Every rank gives its value,",
        "15": "    expected = train_by_hand(train_set, accelerator, args)\n",
    }[lesson_id]
    late = '    time.sleep(60 if os.environ["RANK"] == "1" else 0)\n'
    mutant = write_mutant(tmp_path, lesson_id, (before, late + before))
    status, output = run_ranks(2, mutant, cwd=tmp_path, env={"DIST_TIMEOUT": "4"})
    assert status != 0
    assert re.search(r"4000ms|\(ms\)=4000", output)  # gloo's words, NCCL's words


def join_groups(rank, ranks, ports):
    """Be the same rank of one process group after another."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    lesson = load_lesson("0")
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        with pytest.raises(SystemExit) as end:
            lesson.start()
        assert not end.value.code


def test_many_groups_end_without_a_hang():
    """Before torch 2.8, a gloo group can hang when it is taken down (pytorch#154976)."""
    from torch.distributed import TCPStore

    options = {"is_master": True, "wait_for_workers": False}
    stores = [TCPStore("127.0.0.1", 0, **options) for _ in range(15)]
    ports = [store.port for store in stores]
    ranks = [FORKS.Process(target=join_groups, args=(rank, 4, ports)) for rank in range(4)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 120
    for process in ranks:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * 4, "None: a rank hangs at its end"
