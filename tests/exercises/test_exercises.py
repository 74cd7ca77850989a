"""The exercises: as given each fails with its symptom, solved it passes, and check.py says so."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib

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


# What somebody may write: checks/answers.toml of each day. What says not finished gets 4 seconds.
ANSWERS = [
    full(answer) if answer.get("full") else answer
    for file in sorted(ROOT.glob("day*/exercises/checks/answers.toml"))
    for answer in tomllib.loads(file.read_text())["answer"]
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer["exercise"])
def test_what_somebody_may_write_is_judged(answer, tmp_path):
    says = answer["says"]
    source = file_of(answer["exercise"], solution="given" not in answer).read_text()
    assert source.count(answer["text"]) == 1
    file = tmp_path / "written.py"
    file.write_text(source.replace(answer["text"], answer["instead"]))
    limit = 4 if "not finished" in says else LIMIT
    wrong = wrong_lines(run_check(EXERCISES[answer["exercise"]], file, limit))
    if says == "passes":
        assert not wrong
    else:
        assert any(re.match(f"ranks? [\\d, ]+: {says}", line) for line in wrong), wrong


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
    return status, re.sub(r"^ *\.\.\. .*\n", "", output, flags=re.M)  # without signs of life


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
    with processes.Job(command, 160, stderr=subprocess.STDOUT) as job:
        assert any("Save the file, and it is checked again" in line for line in job.lines())
        assert "TODO: lines " in job.output
        shutil.copyfile(file_of("2.1", solution=True), course / EXERCISES["2.1"]["file"])
        job.wait()
    assert job.trouble == ""
    assert "\npassed\n" in job.output


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
