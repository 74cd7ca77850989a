"""The exercises: every solution passes, every file as given fails with the message meant for it."""

import ast
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir

import pytest
from helpers import LESSONS, ROOT, copy_tree, once, processes_of, wait_for
from ranks import run_ranks

MANIFEST = tomllib.loads((ROOT / "scripts" / "exercises.toml").read_text())["exercise"]
EXERCISES = {exercise["id"]: exercise for exercise in MANIFEST}
CHECKS = {path.stem: path for path in (ROOT / "scripts" / "exercises").glob("*.py")}
FIELDS = {
    "fill in": ["Lesson", "Kind", "Task", "Run", "Check"],
    "find the fault": ["Lesson", "Kind", "Symptom", "Run", "Check"],
    "capstone": ["Lesson", "Kind", "Symptom", "Run", "Check"],
}
RULER = "# ---- The same in every exercise: how the ranks start, and how they end ----\n"


def file_of(exercise_id, solution=False):
    file = ROOT / EXERCISES[exercise_id]["file"]
    return file.parent / "solutions" / file.name if solution else file


def ranks_of(file):
    """Return how many ranks a file starts."""
    return int(re.search(r'"--nproc-per-node=(\d+)"', file.read_text())[1])


def copy_course(folder):
    """Copy what the exercises need: checks leave a record, and some tests break an exercise."""
    (folder / "scripts").mkdir(parents=True)
    for name in ("check.py", "exercises.toml"):
        shutil.copyfile(ROOT / "scripts" / name, folder / "scripts" / name)
    for name in ("checks", "lib"):
        copy_tree(ROOT / "scripts" / name, folder / "scripts" / name)
    for day in ("day1", "day2"):
        if (ROOT / day / "exercises").exists():
            copy_tree(ROOT / day / "exercises", folder / day / "exercises")
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def start_check(course, *arguments, before=()):
    return subprocess.Popen(
        [*before, sys.executable, str(course / "scripts" / "check.py"), *arguments],
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
        if re.match(r"[\w-]+\.\d+  day", line):
            lines = found[line.split()[0]] = []
        lines.append(line)
    return found


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    """What check.py says of the files as given, and of the solutions; what the files print."""
    course = copy_course(tmp_path_factory.mktemp("checked") / "my course")
    folder = tmp_path_factory.mktemp("by_hand")
    # Exercise 6.2 writes over files in turn. A slow disk takes a third of a second for each.
    env = {"TMPDIR": "/dev/shm" if Path("/dev/shm").is_dir() else gettempdir()}

    def run():
        jobs = [start_check(course, "all"), start_check(course, "all", "--solution")]
        printed = {}
        for exercise in MANIFEST:
            file = ROOT / exercise["file"]
            _, printed[exercise["id"]] = run_ranks(ranks_of(file), file, cwd=folder, env=env)
        assert list(folder.iterdir()) == []
        return [*map(finish, jobs), printed]

    return once(tmp_path_factory, "outputs", run)


@pytest.fixture(scope="session")
def given(outputs):
    return outputs[0]


@pytest.fixture(scope="session")
def solved(outputs):
    return outputs[1]


@pytest.fixture(scope="session")
def by_hand(outputs):
    """What the files print when they are run: {id: text}."""
    return outputs[2]


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
    *lines, why = lines
    assert why == f"  ->  What was wrong: {EXERCISES[exercise_id]['consequence']}"
    assert lines
    assert all(re.match(r"  ok  .*(right: |limits? )", line) for line in lines)


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_file_as_given_fails_with_the_message_meant_for_it(exercise_id, given):
    _, output = given
    lines, exercise = sections(output)[exercise_id], EXERCISES[exercise_id]
    wrong = [line.removeprefix("  NO  ") for line in lines if line.startswith("  NO  ")]
    expected = exercise["fails_with"]
    for message in [expected] if isinstance(expected, str) else expected:
        assert any(re.match(message, line) for line in wrong), "\n".join(lines)
    assert exercise["consequence"] not in output  # a check tells symptoms, no causes
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
        assert len(set(exercise["hints"])) == 3
        assert file_of(exercise_id, solution=True).exists()


def test_every_exercise_has_its_check_and_every_check_its_exercise():
    expected = {f"exercise_{name.replace('.', '_')}": name for name in EXERCISES}
    assert set(CHECKS) == {"__init__", "common", *expected}
    for stem, exercise_id in expected.items():
        tree = ast.parse(CHECKS[stem].read_text())
        assert ast.get_docstring(tree).startswith(f"Exercise {exercise_id}: ")
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        takes = {function.name: ast.unparse(function.args) for function in functions}
        assert takes["look"] == "exercise, rank, world_size"
        assert takes["judge"] == "seen"


def imports_of(node):
    """Return the names of the modules that a node of a syntax tree imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


@pytest.mark.parametrize("stem", CHECKS)
def test_a_check_imports_only_what_lies_below_it(stem):
    """No other check and no script; and PyTorch inside of functions, so check.py waits for none."""
    tree = ast.parse(CHECKS[stem].read_text())
    below = set() if stem in ("__init__", "common") else {"checks.common"}
    own = {"", "checks", "lib", *(path.stem for path in ROOT.glob("scripts/*.py"))}
    for node in ast.walk(tree):
        others = set(imports_of(node)) - below
        roots = {name.partition(".")[0] for name in others}
        assert not roots & own, f"{stem} imports {others}"
        if node in tree.body:
            assert roots <= sys.stdlib_module_names, f"{stem} imports {others} at once"


def test_every_lesson_has_an_exercise_and_all_kinds_exist():
    numbered = {name for name in LESSONS if name.isdigit()}
    assert numbered <= {exercise["lesson"] for exercise in MANIFEST}
    assert {exercise["kind"] for exercise in MANIFEST} == set(FIELDS)
    capstones = [exercise for exercise in MANIFEST if exercise["kind"] == "capstone"]
    assert [exercise["file"][:4] for exercise in capstones] == ["day1", "day2"]
    assert all(len(exercise["fails_with"]) == 3 for exercise in capstones)


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
    assert len(text.splitlines()) <= (130 if EXERCISES[exercise_id]["kind"] == "capstone" else 105)
    assert max(map(len, text.splitlines())) <= 88
    for hint in EXERCISES[exercise_id]["hints"]:
        assert hint not in text


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_idea_stands_on_the_first_screen(exercise_id):
    """What is to be found or written, then main, then the ruler."""
    texts = [file_of(exercise_id, solution).read_text() for solution in (False, True)]
    bodies = [text.split('"""\n', 1)[1] for text in texts]
    codes = difflib.SequenceMatcher(None, *map(str.splitlines, bodies)).get_opcodes()
    changed = [code[1] for code in codes if code[0] != "equal"]
    lines = bodies[0].splitlines()
    places = [place for place in changed if not lines[place].startswith(("import ", "from "))]
    assert places[0] <= 45
    assert places[-1] < lines.index("def main():")
    assert lines.index("def main():") < lines.index(RULER.strip())


def test_all_files_start_their_ranks_alike():
    files = [file_of(name, solution) for name in EXERCISES for solution in (False, True)]
    tails, gathers = set(), set()
    for file in files:
        above, ruler, below = file.read_text().partition(RULER)
        assert ruler, file
        assert "def start(" not in above
        gather, name, tail = below.partition("def start():\n")
        assert name, file
        gathers.add(gather)
        tails.add(re.sub(r"--nproc-per-node=\d+", "--nproc-per-node=N", tail))
        assert ranks_of(file) == EXERCISES[file.name.split("_")[0]]["processes"], file
    assert len(tails) == 1
    assert len(gathers - {"\n\n"}) == 1  # some have no gather


def test_python_and_torchrun_start_the_ranks(tmp_path):
    """With python as many as the file says, with torchrun as many as it is told."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    jobs = [
        subprocess.Popen([sys.executable, *before, file_of(name, solution=True)], **options)
        for name, before in (("2.1", []), ("0.1", torchrun))
    ]
    outputs = [job.communicate(timeout=100)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert re.findall(r"^epoch (\d)", outputs[0], re.M) == [*"01234"]
    rows = "rank 0: value 0, mean over the ranks 0.5\nrank 1: value 1, mean over the ranks 0.5\n"
    assert outputs[1] == rows


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_a_file_run_by_hand_shows_the_symptom(exercise_id, by_hand):
    output = by_hand[exercise_id]
    assert re.search(EXERCISES[exercise_id]["shows"], output), output


# check.py, used well and badly


def test_an_unknown_id_gets_one_sentence(course):
    status, output = check(course, "99.9")
    assert status == 2
    assert output == "There is no exercise 99.9. python scripts/check.py lists them.\n"


def test_one_exercise_alone(course):
    """The first, as next: as given it fails with the message meant for it, solved it passes."""
    first, second, *_ = EXERCISES
    status, output = check(course, "next")
    assert status == 1
    assert output.startswith(f"{first}  {EXERCISES[first]['file']}, ranks: 4\nTask:    Complete")
    kept = course / "runs" / "exercises.json"
    failed = json.loads(kept.read_text())[first]
    assert failed["started"] <= time.time()
    assert "minutes" not in failed
    shutil.copyfile(file_of(first, solution=True), course / EXERCISES[first]["file"])
    status, output = check(course, "next")
    assert status == 0
    assert output.endswith(f"\npassed\nnext: {EXERCISES[second]['file']}\n")
    passed = json.loads(kept.read_text())[first]
    assert passed["started"] == failed["started"]
    assert 0 < passed["minutes"] < 10


def test_next_goes_to_the_first_that_has_not_passed(course):
    """A file that was changed since it passed counts again; with nothing left, it says so."""
    files = {name: course / exercise["file"] for name, exercise in EXERCISES.items()}
    digests = {name: sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items()}
    record = {name: {"state": "passed", "digest": digests[name]} for name in EXERCISES}
    kept = course / "runs" / "exercises.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps(record))
    expected = f"All {len(EXERCISES)} exercises have passed.\n"
    assert check(course, "next") == (0, expected)
    files["10.1"].unlink()  # there is nothing to run: quick
    status, output = check(course, "next")
    assert status == 1
    assert output.startswith("10.1  day2/exercises/10.1_")
    assert json.loads(kept.read_text())["10.1"]["state"] == "not yet"
    status, output = check(course, "next", "4.1")
    assert (status, output.partition(":")[0]) == (2, "next stands alone")


def states(course):
    _, output = check(course)
    rows = [line.split() for line in output.splitlines() if re.match(r" *\d+\.\d+ ", line)]
    assert [row[0] for row in rows] == list(EXERCISES)
    return {row[0]: " ".join(row[1:3]) if row[1] == "not" else row[1] for row in rows}


def test_a_lesson_lists_its_exercises(course):
    status, output = check(course, "13")
    assert status == 0
    rows = [line.split()[:2] for line in output.splitlines() if " day2/exercises/" in line]
    assert rows == [[name, "-"] for name in EXERCISES if name.startswith("13.")]
    for bad in (["13", "4.1"], ["13", "--hint"], ["all", "--hint"]):
        assert check(course, *bad)[0] == 2


def test_hints_come_one_at_a_time_and_run_nothing(course):
    hints = EXERCISES["0.1"]["hints"]
    for number, hint in [*enumerate(hints, 1), (1, hints[0])]:  # after the last the first again
        expected = f"0.1, hint {number} of 3: {hint}\n"
        assert check(course, "next" if number == 2 else "0.1", "--hint") == (0, expected)
    assert states(course)["0.1"] == "-"


# What may go wrong in a learner's function: {exercise: (function, its body, what check.py says)}.
BROKEN = {
    "0.1": ("mean", 'raise ValueError("ouch")', r"rank 0: line \d+: ValueError: ouch"),
    "1.1": ("time_all_reduce", "sys.exit(3)", r"rank 0: ended itself by exit\(3\)"),
    "4.4": ("my_part", "os._exit(0)", r"rank 0: the process ended without a message"),
    "6.2": (
        "save",
        'assert dist.get_rank() != 2, "ouch"; dist.barrier()',
        r"rank 2: line \d+: AssertionError: ouch",
    ),
    "8.1": ("another_name", "pass", r"rank 0: AttributeError: .*make_points"),
    "8.2": ("learning_rates", "while True: pass", r"rank 0, 1: not finished \(limit 4 s\)"),
    "16.2": ("train", "return None", r"rank 0: .*TypeError"),
    "9.2": ("make_groups", "return (", r"rank 0: line \d+: SyntaxError"),
    "10.2": (
        "evaluate",
        "return 0.5 if dist.get_rank() != 1 else dist.barrier()",
        r"rank 1: not finished \(limit 4 s\)",
    ),
}
# Solutions with the work left out, or with another mistake: {exercise: (text, instead, message)}.
WRONG = {
    "0.2": (
        "dist.all_reduce(images, group=group)",
        "pass",
        r"rank 0: printed .* \(right: 2042\)",
    ),
    "2.1": ("optimizer.zero_grad()", "pass", r"rank 0: after batches of 4, 4 and 2 points they"),
    "3.1": (
        "dist.barrier()  # nobody",
        "pass  # nobody",
        r"rank 1: (read [\d,]+ labels, |.*FileNotFoundError)",
    ),
    "4.1": ("(model.parameters(), 1.0)", "(model.parameters(), 9)", r"rank 0: parameters within"),
    "4.2": ("set_epoch(epoch)", "set_epoch(epoch + rank)", r"all ranks: numbers seen exactly o"),
    "4.3": ("optimizer.step()", "pass", r"rank 0: loss"),
    "6.1": (
        "torch.manual_seed(0)",
        "torch.manual_seed(world_size)",
        r"rank 0: parameters within [\d.]+ of",
    ),
    "13.3": (
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
        r"rank 0: counts 32 of 40 \(right: 8 of 10\)",
    ),
    "11.1": ("self.file = h5py.File(self.path)", "self.file = None", r"rank 0: .*TypeError"),
    "11.2": ("[:even]", "[:world_size]", r"rank 0: 1 batches of 10 chunks \(right: 2\)"),
    "8.3": ("return losses / world_size", "return losses", r"report: .* are reported as 10"),
    "9.1": ("if dist.get_rank(within) == 0:", "if True:", r"node 0: ranks that have read .*: 2"),
    "11.3": ("order[rank::world_size]", "order[:4]", r"all ranks: images seen exactly once"),
    "12.1": (
        'self.noise.set_state(state["noise"])',
        "pass",
        r"rank 0: stopped after 2 steps: para",
    ),
    "13.4": ('"val" if', '"test" if', r"rank 0: train/ and val/ with 3 classes: .*FileNotFound"),
    "14.1": ("(all_values) / world_size", "(all_values)", r"rank 0: row 0: 30, 33; right: 10, 11"),
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
    shutil.copyfile(file_of(RIGHT, solution=True), course / EXERCISES[RIGHT]["file"])
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


def test_ctrl_c_leaves_alone_a_check_in_the_background(course):
    """A script starts a command before & so that it ignores Ctrl-C."""
    before = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    job = start_check(course, RIGHT, "--solution", before=before)
    output = job.stdout.readline()
    os.killpg(job.pid, signal.SIGINT)
    status, rest = finish(job)
    assert status == 0, output + rest
