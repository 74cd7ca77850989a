"""The exercises: every solution passes, every file as given fails with the message meant for it."""

import ast
import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import gettempdir

import pytest
from helpers import LESSONS, ROOT, once, processes_of, wait_for

MANIFEST = tomllib.loads((ROOT / "scripts" / "exercises.toml").read_text())["exercise"]
EXERCISES = {exercise["id"]: exercise for exercise in MANIFEST}
FIELDS = {
    "fill in": ["Lesson", "Kind", "Task", "Run", "Check"],
    "find the fault": ["Lesson", "Kind", "Symptom", "Run", "Check"],
}
# Runs the program of one exercise after another, with one fork server for all of them.
RUN_BY_HAND = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from check import load
for file in sys.argv[2:]:
    print("FILE", file, flush=True)
    processes = int(open(file).read().rpartition("launch(")[2].partition(")")[0])
    try:
        load(file).launch(processes)
    except Exception as error:
        print(str(error).strip().splitlines()[-1], flush=True)
"""


def file_of(exercise_id, solution=False):
    file = ROOT / EXERCISES[exercise_id]["file"]
    return file.parent / "solutions" / file.name if solution else file


def copy_course(folder):
    """Copy what the exercises need: checks leave a record, and some tests break an exercise."""
    (folder / "scripts").mkdir(parents=True)
    for name in ("check.py", "exercises.toml"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    for day in ("day1", "day2"):
        if (ROOT / day / "exercises").exists():
            shutil.copytree(ROOT / day / "exercises", folder / day / "exercises")
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def start_check(course, *arguments):
    return subprocess.Popen(
        [sys.executable, str(course / "scripts" / "check.py"), *arguments],
        cwd=course.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=200):
    """Wait for the end of check.py; return (exit status, output) and leave no process behind."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert wait_for(lambda: not processes_of(process.pid), 5), "processes are left behind"
    assert "Traceback" not in output
    return process.returncode, output


def check(course, *arguments):
    return finish(start_check(course, *arguments))


def sections(output):
    """Return {id: its lines} of an output of check.py."""
    found, lines = {}, []
    for line in output.splitlines():
        if re.match(r"\d+\.\d+  day", line):
            lines = found[line.split()[0]] = []
        lines.append(line)
    return found


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    """What check.py says of the files as given, and of the solutions; what the files print."""
    course = copy_course(tmp_path_factory.mktemp("checked") / "my course")
    folder = tmp_path_factory.mktemp("by_hand")
    files = [str(ROOT / exercise["file"]) for exercise in MANIFEST]

    def run():
        jobs = [start_check(course, "all"), start_check(course, "all", "--solution")]
        command = [sys.executable, "-c", RUN_BY_HAND, str(ROOT / "scripts"), *files]
        # Exercise 6.2 writes over files in turn. A slow disk takes a third of a second for each.
        env = {**os.environ, "TMPDIR": "/dev/shm" if Path("/dev/shm").is_dir() else gettempdir()}
        options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
        done = subprocess.run(command, **options, timeout=300)
        assert list(folder.iterdir()) == []
        return [*map(finish, jobs), done.stdout]

    return once(tmp_path_factory, "outputs", run)


@pytest.fixture(scope="session")
def given(outputs):
    return outputs[0]


@pytest.fixture(scope="session")
def solved(outputs):
    return outputs[1]


@pytest.fixture(scope="session")
def by_hand(outputs):
    """What the files print when they are run: {file: text}."""
    parts = [part.partition("\n") for part in outputs[2].split("FILE ")[1:]]
    return {file: text for file, _, text in parts}


@pytest.fixture
def course(tmp_path):
    return copy_course(tmp_path / "my course")


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_solution_passes(exercise_id, solved):
    _, output = solved
    title, *lines, verdict = sections(output)[exercise_id]
    if verdict.endswith(" passed"):  # the line that counts them all, after the last one
        *lines, verdict = lines
    assert title.endswith(", the solution")
    assert verdict == "passed", "\n".join(lines)
    assert lines
    assert all(line.startswith("  ok  ") for line in lines)


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_file_as_given_fails_with_the_message_meant_for_it(exercise_id, given):
    _, output = given
    lines, exercise = sections(output)[exercise_id], EXERCISES[exercise_id]
    wrong = [line.removeprefix("  NO  ") for line in lines if line.startswith("  NO  ")]
    assert any(re.match(exercise["fails_with"], line) for line in wrong), "\n".join(lines)
    assert f"  ->  {exercise['consequence']}" in lines
    assert "not yet" in lines


def test_the_exit_status_tells_how_it_went(given, solved):
    for (status, output), expected, passed in ((given, 1, 0), (solved, 0, len(EXERCISES))):
        assert status == expected
        assert output.splitlines()[-1] == f"{passed} of {len(EXERCISES)} passed"


def test_the_list_and_the_folders_agree():
    for folder in ("exercises", "exercises/solutions"):
        files = {path.name for path in ROOT.glob(f"day*/{folder}/*.py")}
        assert files == {file_of(exercise_id).name for exercise_id in EXERCISES}
    for exercise_id, exercise in EXERCISES.items():
        assert exercise_id.split(".")[0] == exercise["lesson"]
        assert exercise["file"].split("/")[0] == LESSONS[exercise["lesson"]]["file"].split("/")[0]
        assert len(exercise["hints"]) == 2
        assert file_of(exercise_id, solution=True).exists()


def test_every_lesson_has_an_exercise_and_both_kinds_exist():
    numbered = {name for name in LESSONS if name.isdigit()}
    assert numbered <= {exercise["lesson"] for exercise in MANIFEST}
    assert {exercise["kind"] for exercise in MANIFEST} == set(FIELDS)


@pytest.mark.parametrize("solution", [False, True], ids=["given", "solution"])
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_docstring_has_its_fields(exercise_id, solution):
    file, exercise = file_of(exercise_id, solution), EXERCISES[exercise_id]
    title, _, *lines = ast.get_docstring(ast.parse(file.read_text())).splitlines()
    assert title.startswith(f"{'Solution' if solution else 'Exercise'} {exercise_id}: ")
    fields = [line.split(":", 1) for line in lines if not line.startswith(" ")]
    assert [name for name, _ in fields] == FIELDS[exercise["kind"]]
    values = {name: value.strip() for name, value in fields}
    assert values["Lesson"] == exercise["lesson"]
    assert values["Kind"] == exercise["kind"]
    assert values["Run"] == f"python {file.relative_to(ROOT)}"
    option = " --solution" if solution else ""
    assert values["Check"] == f"python scripts/check.py {exercise_id}{option}"


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_a_solution_changes_only_a_few_lines_and_says_why(exercise_id):
    texts = [file_of(exercise_id, solution).read_text() for solution in (False, True)]
    bodies = [text.split('"""\n', 1)[1].splitlines() for text in texts]
    lines = list(difflib.ndiff(*bodies))
    new, old = ([line for line in lines if line.startswith(sign)] for sign in ("+ ", "- "))
    assert max(len(new), len(old)) <= 12
    assert any("# " in line for line in new)
    assert ("TODO" in texts[0]) == (EXERCISES[exercise_id]["kind"] == "fill in")
    assert "TODO" not in texts[1]


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_a_file_is_short_and_does_not_tell_its_hints(exercise_id):
    text = file_of(exercise_id).read_text()
    assert len(text.splitlines()) <= 105
    for hint in EXERCISES[exercise_id]["hints"]:
        assert hint not in text


def test_all_files_start_their_ranks_alike():
    files = [file_of(name, solution) for name in EXERCISES for solution in (False, True)]
    tails = {file.read_text().partition("\n\ndef start(")[2] for file in files}
    assert len({re.sub(r"launch\(\d+\)", "launch(N)", tail) for tail in tails}) == 1


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_a_file_run_by_hand_shows_the_symptom(exercise_id, by_hand):
    output = by_hand[str(file_of(exercise_id))]
    assert re.search(EXERCISES[exercise_id]["shows"], output), output


def test_the_readmes_list_the_exercises():
    for day in ("day1", "day2"):
        text = (ROOT / day / "exercises" / "README.md").read_text()
        rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if "](" in line]
        expected = [
            [
                f"[{x['id']}]({x['file'].split('/')[-1]})",
                x["kind"],
                x["lesson"],
                str(x["minutes"]),
                x["about"],
            ]
            for x in MANIFEST
            if x["file"].startswith(day)
        ]
        assert rows == expected


# check.py, used well and badly


def test_an_unknown_id_gets_one_sentence(course):
    status, output = check(course, "99.9")
    assert status == 2
    assert output == "There is no exercise 99.9. python scripts/check.py lists them.\n"


def states(course):
    _, output = check(course)
    rows = [line.split() for line in output.splitlines() if re.match(r" *\d+\.\d+ ", line)]
    assert [row[0] for row in rows] == list(EXERCISES)
    return {row[0]: " ".join(row[1:3]) if row[1] == "not" else row[1] for row in rows}


def test_hints_come_one_at_a_time(course):
    first, second = EXERCISES["0.1"]["hints"]
    for exercise_id in ("0.1", "4.1"):
        (course / EXERCISES[exercise_id]["file"]).unlink()  # there is nothing to run: quick
    status, output = check(course, "0.1", "--hint")
    assert status == 1
    assert f"NO  the file is missing: git checkout {EXERCISES['0.1']['file']}" in output
    assert first in output
    assert second not in output
    assert second in check(course, "0.1", "--hint")[1]
    both = check(course, "4.1", "--hint", "--hint")[1]
    assert all(hint in both for hint in EXERCISES["4.1"]["hints"])


# What may go wrong in a learner's function: {exercise: (function, its body, what check.py says)}.
BROKEN = {
    "0.1": ("mean", 'raise ValueError("ouch")', r"rank 0: line \d+: ValueError: ouch"),
    "1.1": ("choose_device", "sys.exit(3)", r"rank 0: ended itself by exit\(3\)"),
    "4.4": ("my_part", "os._exit(0)", r"rank 0: the process ended without a word"),
    "6.2": (
        "save",
        'assert dist.get_rank() != 2, "ouch"; dist.barrier()',
        r"rank 2: line \d+: AssertionError: ouch",
    ),
    "8.1": ("another_name", "pass", r"rank 0: AttributeError: .*make_optimizer"),
    "8.2": ("learning_rates", "while True: pass", r"rank 0, 1: not finished after 4 s"),
    "9.1": ("choose_device", "return None", r"rank 0: .*AttributeError"),
    "9.2": ("make_groups", "return (", r"rank 0: line \d+: SyntaxError"),
    "10.2": (
        "evaluate",
        "return 0.5 if dist.get_rank() != 1 else dist.barrier()",
        r"rank 1: not finished after 4 s. A collective that not all ranks call\?",
    ),
}
# Solutions with the work left out, or with another mistake: {exercise: (text, instead, message)}.
WRONG = {
    "0.2": (
        "dist.all_reduce(images, group=group)",
        "pass",
        r"rank 0: all_reduce was called, .*: 0",
    ),
    "2.1": ("optimizer.zero_grad()", "pass", r"rank 0: after batches of 4, 4 and 2 they are"),
    "3.1": (
        "dist.barrier()  # nobody",
        "pass  # nobody",
        r"rank 1: (read [\d,]+ of 10,000 labels: not|.*FileNotFoundError)",
    ),
    "4.1": ("flat / world_size", "flat * 0", r"rank 0: gradient 1 became 0; the mean .* is 2\.5$"),
    "4.2": ("set_epoch(epoch)", "set_epoch(epoch + rank)", r"all ranks: each number once .*: no"),
    "4.3": ("optimizer.step()", "pass", r"rank 0: loss"),
    "6.1": (
        "model = DistributedDataParallel(model)",
        "pass",
        r"rank 0: parameters within [1-9]e-0[1-4]",
    ),
    "6.5": (
        "SumOverRanks.apply(moments) / dist",
        "(dist.all_reduce(moments), moments)[1] / dist",
        r"rank 0: gradients",
    ),
    "7.1": (
        "return (time.perf_counter() - begin) / steps",
        "return 0.01",
        r"rank 1: measured 10\.00 ms, a step takes [2-9]\d\.\d+ ms",
    ),
    "10.1": (
        "range(rank, len(images), world_size)",
        "range(len(images))",
        r"rank 0: 32 of 40 right, where 8 of 10 are; it looked at 10",
    ),
    "11.1": ("self.file = h5py.File(self.path)", "self.file = None", r"rank 0: .*TypeError"),
    "11.2": ("[:even]", "[:world_size]", r"rank 0: 1 batches of 10 chunks; all ranks can have 2"),
    "11.3": ("self.rank * workers + worker,", "self.rank,", r"all ranks: \d of 13 chunks come"),
    "14.1": ("all_values / world_size", "all_values", r"rank 0: row 0: 30, 33; right: 10, 11"),
}

RIGHT = "5.1"  # and one that is solved


@pytest.fixture(scope="session")
def broken(tmp_path_factory):
    """What check.py says of files that are broken or wrong."""
    course = copy_course(tmp_path_factory.mktemp("broken") / "my course")
    for exercise_id, (function, body, _) in BROKEN.items():
        imports = "import os\nimport sys\nimport torch.distributed as dist\n"
        text = f"{imports}\ndef {function}(*args):\n    {body}\n"
        (course / EXERCISES[exercise_id]["file"]).write_text(text)
    for exercise_id, (old, new, _) in WRONG.items():
        text = file_of(exercise_id, solution=True).read_text()
        assert text.count(old) == 1, exercise_id
        (course / EXERCISES[exercise_id]["file"]).write_text(text.replace(old, new))
    shutil.copy(file_of(RIGHT, solution=True), course / EXERCISES[RIGHT]["file"])
    checker = course / "scripts" / "check.py"
    text = checker.read_text()
    assert "RUN_LIMIT = 120, 20" in text
    checker.write_text(text.replace("RUN_LIMIT = 120, 20", "RUN_LIMIT = 120, 4"))

    def run():
        before, after = states(course), check(course, *BROKEN, *WRONG, RIGHT)
        marks = states(course)
        with (course / EXERCISES[RIGHT]["file"]).open("a") as file:
            file.write("# changed since\n")
        return *after, before, marks, states(course)[RIGHT]

    return once(tmp_path_factory, "broken", run)


@pytest.mark.parametrize("exercise_id", [*BROKEN, *WRONG])
def test_a_broken_or_wrong_exercise_gets_a_plain_line(exercise_id, broken):
    output = broken[1]
    lines, expected = sections(output)[exercise_id], {**BROKEN, **WRONG}[exercise_id][2]
    assert any(re.match(f"  NO  {expected}", line) for line in lines), "\n".join(lines)
    assert "not yet" in lines


def test_the_list_remembers_what_has_passed(broken):
    status, output, before, after, when_changed = broken
    assert status == 1
    assert output.splitlines()[-1] == f"1 of {len(BROKEN) + len(WRONG) + 1} passed"
    assert before == dict.fromkeys(EXERCISES, "-")
    checked = {RIGHT: "passed", **dict.fromkeys([*BROKEN, *WRONG], "not yet")}
    assert after == {**before, **checked}
    assert when_changed == "-"


def test_a_check_that_is_stopped_leaves_no_process(course):
    """Ctrl-C, which the terminal sends to every process in the foreground, and kill -9."""
    checker = course / "scripts" / "check.py"
    text = checker.read_text()
    assert text.count("        import torch\n") == 1
    # The ranks hang before they import torch, and the fork server does not: quicker, else the same.
    text = text.replace("        import torch\n", "        time.sleep(100)\n")
    checker.write_text(
        text.replace("set_forkserver_preload(modules)", "set_forkserver_preload([])")
    )
    jobs = [start_check(course, "0.1") for _ in range(2)]
    for job in jobs:
        assert job.stdout.readline().startswith("0.1")
        # The fork server, Python's resource tracker, and the ranks.
        assert wait_for(lambda pid=job.pid: len(processes_of(pid)) >= 7, 60)
    os.killpg(jobs[0].pid, signal.SIGINT)
    jobs[1].kill()
    for job in jobs:
        ended = wait_for(lambda j=job: j.poll() is not None and not processes_of(j.pid), 8)
        for pid in processes_of(job.pid):
            os.kill(pid, signal.SIGKILL)
        assert ended
        assert job.returncode != 0
        assert "Traceback" not in job.communicate()[0]
