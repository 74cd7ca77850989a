"""The exercises: as given each fails with its symptom, solved it passes, and check.py says so."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import processes
import pytest
import torch
from catalog import read_days, read_exercises
from exercises.runner import run as run_check
from support.forked_ranks import run_ranks
from support.run import ROOT, copy_tree, full, output_of, wait_for
from support.run import run as run_command

EXERCISES = {exercise["id"]: exercise for exercise in read_exercises()}
# 15.1 shards a model, 17.2 runs PyTorch's pipeline. Before torch 2.8 that needs GPUs.
NOT_ON_CPUS = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="this torch cannot shard or pipeline on CPUs"
)
NEW = ("15.1", "15.6", "15.7", "15.8", "17.2")
IN_CLASS = [x for day in read_days() for part in day["parts"] for x in part.get("exercises", ())]
SOLVED = [pytest.param(x, marks=[NOT_ON_CPUS] if x in NEW else []) for x in EXERCISES]
HOME = [pytest.param(*x.values, marks=[pytest.mark.full, *x.marks]) for x in SOLVED]
GIVEN = [x if x.values[0] in IN_CLASS else home for x, home in zip(SOLVED, HOME)]
LIMIT = 100  # seconds for an exercise that ends: several tests share the cores


def file_of(exercise_id, solution=False):
    file = ROOT / EXERCISES[exercise_id]["file"]
    return file.parent / "solutions" / file.name if solution else file


# How the lines begin that say NO: the result, then one for each of the three faults of a capstone.
CAPSTONES = {"8.3": ["result", "work", "step", "report"]}
CAPSTONES["11.4"] = ["all ranks", "within a rank", "between ranks", "between epochs"]
CAPSTONES["21.2"] = ["result", "tensor", "context", "data and context"]


def wrong_lines(lines):
    """Return the sentences of a check that say NO."""
    return [sentence for right, sentence in lines if not right]


@pytest.mark.parametrize("exercise_id", SOLVED)
def test_solved_it_passes(exercise_id):
    assert_checked(exercise_id, solved=True)


@pytest.mark.parametrize("exercise_id", GIVEN)
def test_as_given_it_fails(exercise_id):
    assert_checked(exercise_id, solved=False)


def assert_checked(exercise_id, solved):
    """Assert that a check finds an exercise wrong as given, or right when solved."""
    lines = run_check(EXERCISES[exercise_id], file_of(exercise_id, solved), LIMIT)
    assert lines
    assert bool(wrong_lines(lines)) != solved, lines
    for _, sentence in lines:  # what was measured, and what is allowed: it has not crashed
        assert re.search(r"right: |limits? ", sentence)
        assert "not finished" not in sentence
    if exercise_id in CAPSTONES and not solved:
        assert [line.partition(":")[0] for line in wrong_lines(lines)] == CAPSTONES[exercise_id]


@pytest.mark.parametrize("exercise_id", HOME)
def test_by_hand_the_solution_runs_and_the_given_shows_something_else(exercise_id, tmp_path):
    ranks = EXERCISES[exercise_id]["processes"]
    solved = output_of(run_ranks(ranks, file_of(exercise_id, solution=True), cwd=tmp_path))
    assert "Traceback" not in solved
    assert run_ranks(ranks, file_of(exercise_id), cwd=tmp_path)[1] != solved
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_python_starts_the_ranks(tmp_path):
    output = output_of(run_command([sys.executable, file_of("2.1", True)], 200, tmp_path, None))
    assert re.findall(r"^epoch (\d)", output, re.M) == [*"01234"]


# A solution with a mistake, half of one, or one that stops: (exercise, its text, instead, what is
# wrong). What says not finished gets 4 seconds.
WRONG = [
    (
        "0.1",
        "dist.all_reduce(",
        "raise ValueError('ouch')  #",
        r"rank 0: line \d+: ValueError: ouch",
    ),
    ("1.1", "begin = time", "exit(3)  #", r"rank 0: called exit\(3\)"),
    ("4.4", "generator = torch", "os._exit(0)  #", r"rank 0: the process ended without a message"),
    ("9.2", "make_groups(per_node):", "make_groups(", r"rank 0: line \d+: SyntaxError"),
    ("0.1", "dist.all_r", "dist.get_rank() == 1 or dist.all_r", r"rank 0, 2, 3: not finished"),
    ("4.4", "return order", "return None  #", r"rank 0: .*TypeError"),
    ("6.1", "async_op=True)", "async_op=True)\n        message.wait()", r"rank 0: .* most: 1 "),
    ("12.2", "crew.form(crew.size - 1)", "os._exit(0)", r"rank 0: killed: crews of member 0: \[\]"),
    ("16.4", "self.weight)) + self.bias", "self.weight, self.bias))", r"rank 0: losses: .* off by"),
    ("17.1", "min(ranks - 1 - rank,", "min(ranks - rank,", r"rank 3: of 8 .* at most 2 \(limit 1"),
    ("21.1", "if x is not expert.down_bias else TENSOR", "", r"rank 0: spread: norm .* off by"),
    ("21.2", "if x.cut is None else 1", "", r"tensor: losses differ from one process's by"),
    ("4.4", "order[rank::", "torch.arange(count)[rank::", r"rank 2: .*shuffled"),
    ("4.5", "sampler.set_epoch(epoch)", "pass", r"rank 0: epoch 0 begins with .* a new order"),
    ("6.2", "if dist.get_rank() == 0:  # all", "if True:  #", r"all ranks: times .* written: 4 "),
    ("6.2", "dist.barrier()  # nobody", "pass  #", r"rank 3: read the file: .* \(right: no error"),
    ("8.3", "return losses / world_size", "return losses", r"report: .* are reported as 10"),
    ("9.1", "if dist.get_rank(within) == 0:", "if True:", r"node 0: ranks that have read .*: 2"),
    ("15.4", "scores.amax(1, keepdim=True)", "torch.zeros(1)", r"rank 0: large scores: nan, "),
    ("16.2", "= all_reduce(parameter.grad)", "= parameter.grad", r"rank 0: .* of the norm .*off"),
    ("16.3", "detach().amax(1)", "detach().amax(1) * 0", r"rank 0: large logits: loss (inf|nan)"),
    # What hides the fault, but isn't the exercise any more.
    full("4.1", "x[rank::world_size], y[rank::world_size]", "x, y", r"rank 0: points .* 64 "),
    full("11.4", "WORKERS = 2", "WORKERS = 1", r"workers of a rank: 1 "),
    full("13.5", "model[0].requires_grad_(False)", "pass", r"rank 0: the first layer .* \[0, 1, "),
]


@pytest.mark.parametrize(("exercise_id", "right", "instead", "message"), WRONG)
def test_a_wrong_solution_gets_a_plain_line(exercise_id, right, instead, message, tmp_path):
    text = file_of(exercise_id, solution=True).read_text()
    assert text.count(right) == 1
    file = tmp_path / "wrong.py"
    file.write_text(text.replace(right, instead))
    limit = 4 if "not finished" in message else LIMIT
    wrong = wrong_lines(run_check(EXERCISES[exercise_id], file, limit))
    assert any(re.match(message, line) for line in wrong), wrong


# A right solution that looks unusual: (exercise, its text, instead).
RIGHT = [
    ("12.2", "torch.arange(BATCH).tensor_split(size)[rank]", "torch.arange(rank, BATCH, size)"),
    ("16.4", "weight)) + self.bias", "weight, None if dist.get_rank() else self.bias))"),
    ("17.1", "    return todo\n\n\ndef build", "    return tuple(todo)\n\n\ndef build"),
    ("21.1", "argsort(stable=True)", "sort()[1]"),
    ("21.2", "self.replicas.at // self.", "dist.get_rank() // self.tensor.size // self."),
]


@pytest.mark.full
@pytest.mark.parametrize(("exercise_id", "text", "instead"), RIGHT)
def test_an_unusual_solution_passes(exercise_id, text, instead, tmp_path):
    file = tmp_path / "unusual.py"
    solution = file_of(exercise_id, solution=True).read_text()
    assert solution.count(text) == 1
    file.write_text(solution.replace(text, instead))
    assert not wrong_lines(run_check(EXERCISES[exercise_id], file, LIMIT))


# check.py, used well and badly


@pytest.fixture
def course(tmp_path):
    """A copy of what check.py needs, to be changed as learners do."""
    root = tmp_path / "my course"
    for folder in ("scripts", "day1/exercises", "day2/exercises"):
        copy_tree(ROOT / folder, root / folder)
    (root / "data").symlink_to(ROOT / "data")
    return root


def check(course, *arguments):
    """Run check.py to its end; return (exit status, what it printed). It must leave nothing."""
    command = [sys.executable, course / "scripts" / "check.py", *arguments]
    status, output = run_command(command, 200, course.parent, None)
    assert "Traceback" not in output
    return status, output


def states(course, *lesson):
    """Return {id: passed or not yet}, as check.py lists them."""
    output = output_of(check(course, *lesson))
    return dict(re.findall(r"^ *(\d+\.\d+)  (passed|not yet) ", output, re.M))


def test_next_goes_from_one_exercise_to_the_following(course):
    first, second, *_ = EXERCISES
    assert states(course) == dict.fromkeys(EXERCISES, "not yet")
    output = output_of(check(course, "next"), 1)
    assert output.startswith(f"{first}  {EXERCISES[first]['file']}, ranks: 4\nTask:    Complete")
    assert output.endswith("\nnot yet\n")
    assert EXERCISES[first]["consequence"] not in output  # symptoms, no causes
    shutil.copyfile(file_of(first, solution=True), course / EXERCISES[first]["file"])
    output = output_of(check(course, "next"))
    assert f"Why: {EXERCISES[first]['consequence']}\npassed\n" in output
    assert output.endswith(f"\nnext: {EXERCISES[second]['file']}\n")
    assert states(course, "0") == {first: "passed", second: "not yet"}
    with (course / EXERCISES[first]["file"]).open("a") as file:
        file.write("# changed since\n")
    assert states(course)[first] == "not yet"


def test_hints_come_one_at_a_time_and_run_nothing(course):
    ((_, hints),) = EXERCISES["0.1"]["hints"].items()
    assert hints[0].startswith("Each rank knows only its own value.")
    assert hints[2].startswith("all_reduce changes the tensor")
    for number, hint in [*enumerate(hints, 1), (1, hints[0])]:  # after the last the first again
        expected = f"0.1, hint {number} of 3: {hint}\n"
        assert check(course, "next" if number == 2 else "0.1", "--hint") == (0, expected)
    assert states(course)["0.1"] == "not yet"


def test_symptom_and_hints_are_about_the_first_thing_that_is_still_wrong(course):
    file = course / EXERCISES["4.5"]["file"]
    text = file_of("4.5", solution=True).read_text().replace("parameter.grad /= ", "")
    epoch, mean = "sampler.set_epoch(epoch)", "parameter.grad /="
    for content, symptom, more, answer, other in (
        (text.replace(epoch, ""), "a new order", 2, epoch, mean),
        (text, "2.5 on each", 1, mean, epoch),
    ):
        file.write_text(content)
        assert check(course, "4.5", "--hint")[1].startswith("Check the file as it is now: then")
        output = output_of(check(course, "4.5"), 1)
        assert f"\n      and {more} more symptom" in output
        assert all(f"(right: {symptom})" in line for line in re.findall("^  NO .*", output, re.M))
        hints = [output_of(check(course, "4.5", "--hint")) for _ in range(3)]
        assert [hint[:18] for hint in hints] == [f"4.5, hint {n} of 3: " for n in (1, 2, 3)]
        assert answer in hints[2]
        assert other not in "".join(hints)


def test_a_reader_that_closes_early_gets_no_traceback(course):
    command = f"'{sys.executable}' scripts/check.py {{}} | head -1"
    for arguments in ("", "0.1", "4.1 --hint"):
        line = output_of(run_command(["bash", "-c", command.format(arguments)], 200, course, None))
        assert line.count("\n") == 1
        assert "Traceback" not in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["99.9"], "There is no exercise 99.9. python scripts/check.py lists them."),
        (["13", "--hint"], "--hint takes one exercise: python scripts/check.py 4.1 --hint"),
        (["--solution"], "--solution takes one exercise: python scripts/check.py 4.1 --solution"),
    ],
)
def test_a_wrong_argument_gets_one_sentence(arguments, says):
    assert check(ROOT, *arguments) == (2, f"{says}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, full(signal.SIGTERM), full(signal.SIGKILL)])
def test_a_check_that_is_stopped_leaves_no_process_and_a_whole_record(number, course):
    """Ctrl-C, which the terminal sends to all in the foreground, the end of a session, kill -9."""
    check(course, "4.1", "--hint")
    text = "import os\nopen(f'{__file__}.{os.getpid()}', 'w')\nwhile True:\n    pass\n"
    file = course / EXERCISES["0.1"]["file"]
    file.write_text(text)
    command = [sys.executable, course / "scripts" / "check.py", "0.1"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with processes.Group() as group:
        job = group.start(command, **streams)
        ready = wait_for(lambda: len([*file.parent.glob(f"{file.name}.*")]) == 4, 60)
        if number == signal.SIGINT:
            os.killpg(job.pid, number)
        else:
            job.send_signal(number)
        ended = wait_for(lambda: job.poll() is not None and not group.processes(), 15)
    assert ready
    assert ended
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in job.communicate()[0]
    with (course / "runs" / "exercises.json").open() as record:
        _, output = check(course, "4.1", "--hint")
        assert json.load(record) == {"4.1": {"hints": 1}}  # a new file has taken its place
    assert output.startswith("4.1, hint 2 of 3")
