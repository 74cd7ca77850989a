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
NEW = ("15.1", "15.6", "15.7", "15.8", "17.2")  # before torch 2.8 these need GPUs
IN_CLASS = [x for day in read_days() for part in day["parts"] for x in part.get("exercises", ())]
HOME = [full(x) for x in EXERCISES]
GIVEN = [x if x in IN_CLASS else full(x) for x in EXERCISES]
LIMIT = 100  # seconds for an exercise that ends: several tests share the cores


def file_of(exercise_id, solution=False):
    if exercise_id in NEW and torch.__version__ < (2, 8):
        pytest.skip("this torch cannot shard or pipeline on CPUs")
    file = ROOT / EXERCISES[exercise_id]["file"]
    return file.parent / "solutions" / file.name if solution else file


# How the lines of a capstone begin that say NO: the result, then one for each of its three faults.
CAPSTONES = {"8.3": ["result", "work", "step", "report"]}
CAPSTONES["11.4"] = ["result", "within a rank", "between ranks", "between epochs"]
CAPSTONES["21.2"] = ["result", "tensor", "context", "data and context"]


def wrong_lines(findings):
    """Return the lines of a check that say NO."""
    return [str(finding) for finding in findings if not finding.right]


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_solved_it_passes(exercise_id):
    assert_checked(exercise_id, solved=True)


@pytest.mark.parametrize("exercise_id", GIVEN)
def test_as_given_it_fails(exercise_id):
    assert_checked(exercise_id, solved=False)


def assert_checked(exercise_id, solved):
    """Assert that a check finds an exercise wrong as given, or right when solved."""
    findings = run_check(EXERCISES[exercise_id], file_of(exercise_id, solved), LIMIT)
    assert findings
    assert bool(wrong_lines(findings)) != solved, wrong_lines(findings)
    for finding in findings:  # what was measured, and what is allowed: it has not crashed
        assert finding.allowed
        assert finding.what != "not finished"
        assert finding.key in {"", *EXERCISES[exercise_id]["hints"]}
    if exercise_id in CAPSTONES and not solved:
        wrong = [finding.what.partition(":")[0] for finding in findings if not finding.right]
        assert list(dict.fromkeys(wrong)) == CAPSTONES[exercise_id]


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


# What somebody may write: (exercise, a text of its solution, instead, what the check says of it, or
# passes). With "as given" it's a text of the exercise. What says not finished gets 4 seconds.
BROADCAST = "    [dist.broadcast(x.data, 0) for x in model.parameters()]\n    return model\n"
LISTS = "batch_size=None, sampler=torch.utils.data.BatchSampler(sampler, 8, False)"
SPLIT = "torch.arange(len(images)).tensor_split(world_size)[rank]"
TRAIN = "    train(model, optimizer, 10)\n    model.module.load"
WRITTEN = [
    # Errors
    ("0.1", "dist.all_reduce(", "raise ValueError('ouch')  #", r"line \d+: ValueError: ouch"),
    ("7.1", "begin = time", "exit(3)  #", r"line \d+: SystemExit: 3"),
    ("2.1", "def train_one_epoch(", "def f(", "the file has no train_one_epoch"),
    ("4.4", "generator = torch", "os._exit(0)  #", "the process ended without a message"),
    ("9.2", "make_groups(per_node):", "make_groups(", r"line \d+: SyntaxError"),
    ("0.1", "dist.all_r", "dist.get_rank() == 1 or dist.all_r", r"not finished \(limit"),
    # What looks right
    ("4.3", "manual_seed(rank)", "manual_seed(1)", "ranks that have its noise: 4"),
    ("4.3 as given", "    return model\n", BROADCAST, "the most by which parameters differ"),
    ("4.4", "order[rank::", "torch.arange(count)[rank::", "epoch 0 is in order: True"),
    ("4.5", "sampler.set_epoch(epoch)", "pass", "the order of epoch 1 is that of epoch 0: True"),
    ("6.2", "if dist.get_rank() == 0:  # all", "if True:  #", "times that .* written: 4 "),
    ("6.2", "dist.barrier()  # nobody", "pass  #", "reading the file ended with .*Error"),
    ("6.4 as given", "momentum=0.9", "momentum=0", "with this check's model, 5 steps after"),
    ("6.4 as given", "    model.module.load", TRAIN, "with this check's model, 5 steps after"),
    ("8.3", "return losses / world_size", "return losses", "report: .* are reported as 10"),
    ("9.1", "if dist.get_rank(within) == 0:", "if True:", "ranks of node 0 that have read .*: 2"),
    ("15.4", "scores.amax(1, keepdim=True)", "torch.zeros(1)", "large scores: nan, "),
    ("16.2", "= all_reduce(parameter.grad)", "= parameter.grad", "sequence: gradients of the norm"),
    (
        "16.2",
        "reduce_scatter(x @ weight.T)",
        "own_part(all_reduce(x @ weight.T), 0)",
        ".*bytes sent",
    ),
    ("16.3", "detach().amax(1)", "detach().amax(1) * 0", r"large logits: loss (inf|nan)"),
    ("16.3", "logits.detach().amax(1)", "Gather.apply(logits.detach()).amax(1)", "bytes sent"),
    ("6.1", "async_op=True)", "async_op=True)\n        message.wait()", "messages in .* most: 1 "),
    ("12.2", "crew.form(crew.size - 1)", "os._exit(0)", r"killed: crews of member 0: \[\]"),
    ("16.4", "self.weight)) + self.bias", "self.weight, self.bias))", "losses: .* off by"),
    ("17.1", "min(ranks - 1 - rank,", "min(ranks - rank,", r"of 8 .* at most 2 \(limit 1"),
    ("21.1", "if x is not expert.down_bias else TENSOR", "", "spread: norm .* off by"),
    ("21.2", "if x.cut is None else 1", "", "tensor: losses differ from one process's by"),
    # What hides the fault, but isn't the exercise any more.
    full("4.1", "x[rank::world_size], y[rank::world_size]", "x, y", "points that .* 64 "),
    full("11.4", "WORKERS = 2", "WORKERS = 1", "workers of a rank: 1 "),
    full("13.5", "model[0].requires_grad_(False)", "pass", r"the first layer .* 0, 1, "),
    # What looks unusual, and is right
    ("4.4", "order[rank::world_size]", "order.chunk(world_size)[rank]", "passes"),
    ("4.5", "batch_size=batch_size, sampler=sampler", LISTS, "passes"),
    ("8.3", "batch_size=BATCH_SIZE, sampler=sampler", LISTS.replace("8", "BATCH_SIZE"), "passes"),
    ("10.1", "list(range(rank, len(images), world_size))", SPLIT, "passes"),
    full(
        "12.2",
        "torch.arange(BATCH).tensor_split(size)[rank]",
        "torch.arange(rank, BATCH, size)",
        "passes",
    ),
    full(
        "16.4", "weight)) + self.bias", "weight, None if dist.get_rank() else self.bias))", "passes"
    ),
    full(
        "17.1", "    return todo\n\n\ndef build", "    return tuple(todo)\n\n\ndef build", "passes"
    ),
    full("21.1", "argsort(stable=True)", "sort()[1]", "passes"),
    full(
        "21.2",
        "self.replicas.at // self.",
        "dist.get_rank() // self.tensor.size // self.",
        "passes",
    ),
    full(
        "15.8", "orthogonal(momentum.full_tensor())", "orthogonal(momentum).full_tensor()", "passes"
    ),
]


@pytest.mark.parametrize(("exercise_id", "text", "instead", "message"), WRITTEN)
def test_what_somebody_may_write_is_judged(exercise_id, text, instead, message, tmp_path):
    exercise_id, _, given = exercise_id.partition(" ")
    source = file_of(exercise_id, solution=not given).read_text()
    assert source.count(text) == 1
    file = tmp_path / "written.py"
    file.write_text(source.replace(text, instead))
    limit = 4 if "not finished" in message else LIMIT
    wrong = wrong_lines(run_check(EXERCISES[exercise_id], file, limit))
    if message == "passes":
        assert not wrong
    else:
        assert any(re.match(f"ranks? [\\d, ]+: {message}", line) for line in wrong), wrong


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


def test_next_goes_through_the_timetable(course):
    first, second, *_ = IN_CLASS
    assert states(course) == dict.fromkeys(EXERCISES, "not yet")
    output = output_of(check(course, "next"), 1)
    assert output.startswith(f"{first}  {EXERCISES[first]['file']}, ranks: 4\nTask:    Complete")
    assert output.endswith("\nnot yet\n")
    assert EXERCISES[first]["consequence"] not in output  # symptoms, no causes
    shutil.copyfile(file_of(first, solution=True), course / EXERCISES[first]["file"])
    output = output_of(check(course, "next"))
    assert f"Why: {EXERCISES[first]['consequence']}\npassed\n" in output
    assert output.endswith(f"\nnext: {EXERCISES[second]['file']}\n")
    assert states(course, "0") == {first: "passed", "0.2": "not yet"}
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
        (text.replace(epoch, ""), "the order of epoch 1", 1, epoch, mean),
        (text, "it turns 1, 2, 3, 4 into 10,", 0, mean, epoch),
    ):
        file.write_text(content)
        output = output_of(check(course, "4.5"), 1)
        assert ("\n      and 1 more symptom\n" in output) == bool(more)
        assert all(symptom in line for line in re.findall("^  NO .*", output, re.M))
        hints = [output_of(check(course, "4.5", "--hint")) for _ in range(3)]
        assert [hint[:18] for hint in hints] == [f"4.5, hint {n} of 3: " for n in (1, 2, 3)]
        assert answer in hints[2]
        assert other not in "".join(hints)


def test_several_a_path_and_a_damaged_record(course):
    runs = course / "runs"
    runs.mkdir()
    (runs / "exercises.json").write_text('{"0.1": {"hints": "x"}, "2.1": [], "4.1": {"passed": 7}}')
    for name in ("0.1", "2.1"):
        shutil.copyfile(file_of(name, solution=True), course / EXERCISES[name]["file"])
    status, output = check(course, "0.1", EXERCISES["2.1"]["file"])
    assert (status, output.count("\npassed\n")) == (0, 2)
    assert states(course, "list", "2") == {"2.1": "passed"}


def test_where_nothing_can_be_remembered_all_hints_come_with_a_word(course):
    (course / "runs").write_text("a file, not a folder")
    status, output = check(course, "0.1", "--hint")
    assert status == 0
    assert "Can't remember this in runs/exercises.json" in output
    assert all(hint in output for hint in EXERCISES["0.1"]["hints"][""])


def test_watch_checks_again_when_the_file_is_saved(course):
    command = [sys.executable, course / "scripts" / "check.py", "2.1", "--watch"]
    log = course / "log"
    with processes.Group() as group, log.open("w") as stream:
        job = group.start(command, stdout=stream)
        assert wait_for(lambda: "Save the file, and it is checked again" in log.read_text(), 100)
        assert "TODO: lines " in log.read_text()
        shutil.copyfile(file_of("2.1", solution=True), course / EXERCISES["2.1"]["file"])
        assert wait_for(lambda: job.poll() == 0, 60)
    assert "\npassed\n" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["99.9"], "There is no exercise 99.9. python scripts/check.py lists them."),
        (["13", "--hint"], "Name one exercise: python scripts/check.py 4.1 --hint"),
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
    with processes.Job(command, stderr=subprocess.STDOUT) as job:
        ready = wait_for(lambda: len([*file.parent.glob(f"{file.name}.*")]) == 4, 60)
        if number == signal.SIGINT:
            os.killpg(job.process.pid, number)
        else:
            job.process.send_signal(number)
        ended = wait_for(lambda: job.status is not None and not job.processes(), 15)
    assert ready
    assert ended
    assert job.status == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in job.output
    with (course / "runs" / "exercises.json").open() as record:
        _, output = check(course, "4.1", "--hint")
        assert json.load(record) == {"4.1": {"hints": 1}}  # a new file has taken its place
    assert output.startswith("4.1, hint 2 of 3")
