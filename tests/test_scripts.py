"""The commands in scripts/."""

import ast
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import LAUNCHER, LESSONS, ROOT, cannot, copy_tree, launch, works
from launcher import processes


def run_course(*arguments, root=ROOT, cwd):
    command = [sys.executable, root / "scripts" / "run_course.py", *arguments]
    job = processes.run(command, 200, cwd=cwd, stderr=subprocess.PIPE)
    return subprocess.CompletedProcess(command, job.status, job.output, job.errors)


# Starts three processes that ignore SIGTERM and keep stdout open.
STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for place in ({}, {"process_group": 0}, {"start_new_session": True}):
    subprocess.Popen(["sleep", "600"], **place)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the lessons do
"""
PLANTED = {  # {id of a lesson: its file}
    "well": "print('=> well: ok')",
    "leaves": STUBBORN + "print('=> well: ok')",
    "hangs": STUBBORN + "print('planted', flush=True); time.sleep(600)",
    "cannot": "import sys; print('begins'); print('This machine has no wheels.'); sys.exit(69)",
    "silent": "print('ends well, and proves nothing')",
    "fails": "import sys; sys.exit('This lesson has no wheels.')",
    "slow": STUBBORN + "print('planted', flush=True); time.sleep(20)",
}


@pytest.fixture
def planted(tmp_path):
    """A course with the lessons of PLANTED, which may take 4 s, in a folder; return the folder.

    It writes no report: what that imports takes seconds to load.
    """
    copy_tree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "day1").mkdir()
    lessons = []
    for name, text in PLANTED.items():
        (tmp_path / "day1" / f"{name}.py").write_text(text)
        seconds = 60 if name == "slow" else 0.4
        lessons.append(
            f'[[lesson]]\nid = "{name}"\nfile = "day1/{name}.py"\nidea = "{name}"\n'
            f"arguments = []\nseconds = {seconds}\n"
        )
    (tmp_path / "scripts" / "course.toml").write_text("\n".join(lessons))
    (tmp_path / "scripts" / "lib" / "report.py").write_text("def write(*arguments):\n    pass\n")
    module = tmp_path / "scripts" / "lib" / "processes.py"
    text, count = re.subn(r"(?m)^(GRACE|SETTLE|PATIENCE) = \d+", r"\1 = 1", module.read_text())
    assert count == 3
    module.write_text(text)
    return tmp_path


def test_run_course_shows_the_proof_of_each_lesson(tmp_path):
    done = run_course("9", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.rpartition("what it showed")[2]
    assert re.search(r"^ +9  => 2 nodes, 4 ranks: every rank holds .*  ok$", table, re.M)
    assert "1 of 1 lessons ok" in table


def test_run_course_fails_when_a_lesson_does(tmp_path):
    copy_tree(ROOT / "day1", tmp_path / "day1")
    copy_tree(ROOT / "scripts", tmp_path / "scripts")
    lesson = tmp_path / "day1" / "0_torch_dist.py"
    key_line = "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n"
    lesson.write_text(lesson.read_text().replace(key_line, ""))
    done = run_course("0", root=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"^ +0  => .*: WRONG +[\d.]+  WRONG$", done.stdout, re.M)
    assert "0 of 1 lessons ok" in done.stdout
    report = (tmp_path / "runs" / "report.html").read_text()
    assert '<span class="state problem">WRONG</span>' in report


def run_planted(*arguments, folder):
    """Run planted lessons. Return (exit status, the table {lesson: what came of it}, output)."""
    command = [sys.executable, folder / "scripts" / "run_course.py", *arguments]
    job = processes.run(command, 120, cwd=folder, stderr=subprocess.STDOUT)
    assert not job.stopped, job.output
    assert job.left == [], job.output
    table = job.output.rpartition("what it showed")[2]
    rows = re.findall(r"^ *(\w+)  (?:=> well: ok)? +([\d.]+)  (.+)$", table, re.M)
    return job.status, {name: (float(seconds), state) for name, seconds, state in rows}, job.output


NAMES = ["hangs", "leaves", "silent", "fails", "well"]


def test_run_course_waits_for_nobody_and_names_the_lesson_that_left_something(planted):
    shutil.copy(ROOT / "scripts" / "lib" / "report.py", planted / "scripts" / "lib")
    status, table, output = run_planted(*NAMES, folder=planted)
    assert status == 1
    assert {name: state for name, (_, state) in table.items()} == {
        "hangs": "stopped after 4 s, processes left: 3",
        "leaves": "processes left: 3",
        "silent": "no proof line",
        "fails": "exit status 1",
        "well": "ok",
    }
    assert 4 <= table["hangs"][0] < 8
    assert len(re.findall(r"^   left behind, ended now: process \d+ sleep 600$", output, re.M)) == 6
    assert "1 of 5 lessons ok, " in output
    report = (planted / "runs" / "report.html").read_text()
    assert '<span class="state problem">stopped after 4 s, processes left: 3</span>' in report
    assert '<span class="state problem">processes left: 3</span>' in report


def test_run_course_skips_what_this_machine_cannot_run(planted):
    status, table, output = run_planted("well", "cannot", folder=planted)
    assert status == 0
    assert table["cannot"][1] == "skipped: This machine has no wheels."
    assert "1 of 1 lessons ok, 1 skipped, " in output


def end_run(number, *before, folder):
    """Start a lesson that takes long, with a command before; send the runner a signal; return it.

    What is returned is a Job at its end.
    """
    command = [*before, sys.executable, folder / "scripts" / "run_course.py", "slow", "well"]
    with processes.Job(command, 120, cwd=folder, stderr=subprocess.STDOUT) as job:
        while next(job.lines()).strip() != "planted":
            pass
        job.process.send_signal(number)
        job.wait()
    return job


@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("HUP", 129), ("TERM", 143)])
def test_what_ends_the_runner_ends_the_lesson(name, status, planted):
    # A shell may have started the tests in the background: then Ctrl-C is ignored.
    listens = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    before = (sys.executable, "-c", f"{listens}; os.execv(sys.argv[1], sys.argv[1:])")
    job = end_run(getattr(signal, f"SIG{name}"), *before, folder=planted)
    assert job.trouble == f"exit status {status}", job.output
    assert "Traceback" not in job.output


def test_in_the_background_with_nothing_to_read_from_the_runner_works_as_usual(planted):
    """As nohup and a closed stdin make it; only SIGTERM can end it then."""
    before = ("sh", "-c", 'trap "" HUP INT; exec "$@" <&-', "sh")
    job = end_run(signal.SIGTERM, *before, folder=planted)
    assert job.trouble == "exit status 143", job.output
    command = [*before, sys.executable, planted / "scripts" / "run_course.py", "well", "leaves"]
    with processes.Job(command, 120, cwd=planted, stderr=subprocess.STDOUT) as job:
        next(job.lines())
        for number in (signal.SIGHUP, signal.SIGINT):
            job.process.send_signal(number)
        job.wait()
    assert job.trouble == "exit status 1", job.output
    assert "1 of 2 lessons ok" in job.output
    assert "Traceback" not in job.output


def test_ctrl_c_at_a_terminal_ends_runner_and_lesson(planted):
    if shutil.which("setsid") is None:
        cannot("needs setsid, to have a terminal of its own")
    # The lesson sees the terminal as its stderr: so it shows its bars there.
    lesson = planted / "day1" / "slow.py"
    lesson.write_text(f"import sys; print(sys.stderr.isatty())\n{PLANTED['slow']}")
    (own, theirs), output = os.openpty(), b""
    command = ["setsid", "--ctty", "--wait", sys.executable]
    command += [planted / "scripts" / "run_course.py", "slow", "well"]
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with processes.Job(command, 120, cwd=planted, **pipes) as job:
        os.close(theirs)
        while b"planted" not in output:
            output += os.read(own, 1024)
        os.write(own, b"\x03")
        job.wait()
    os.close(own)
    assert b"   True\r\n" in output
    assert job.trouble == "exit status 130"


# A file that cannot run here, on any rank. The ranks notice it one after the other.
CANNOT = """
import os, sys, time
if os.environ["RANK"] == "0":
    print("This machine has no wheels.")
time.sleep(0.2 * int(os.environ["RANK"]))
sys.exit(os.EX_UNAVAILABLE)
"""


@pytest.mark.parametrize("how", [(), ("--torchrun",)])
def test_the_launcher_hands_on_that_a_lesson_cannot_run(how, tmp_path):
    (tmp_path / "cannot.py").write_text(CANNOT)
    status, output = launch("--local", "2x2", *how, tmp_path / "cannot.py", cwd=tmp_path)
    assert status == 69, output
    assert "This machine has no wheels.\n" in output
    assert "The first to fail" not in output


def test_so_does_the_launcher_on_slurm(slurm, tmp_path):
    """srun ends the ranks that notice it later; they then have another exit status."""
    (tmp_path / "cannot.py").write_text(CANNOT)
    command = ("salloc", "--quiet", "--nodes", 2, "--gpus-per-node", 2, LAUNCHER)
    done = slurm.run(*command, tmp_path / "cannot.py", cwd=tmp_path)
    assert done.returncode == 69, done.stdout + done.stderr
    assert done.stdout.endswith("This machine has no wheels.\n")
    assert "The first to fail" not in done.stderr


def run_where_read_only(monkeypatch, folder, *arguments):
    """Run run_course.main as if a folder were read-only; return {lesson: its arguments}."""
    runner, ran = importlib.import_module("run_course"), {}

    def run(lesson):
        ran[lesson["id"]] = lesson["arguments"]
        return {"output": "", "showed": "", "seconds": 0, "problem": "", "skipped": ""}

    access = lambda path, mode: path != folder  # noqa: E731
    monkeypatch.setattr(runner, "os", types.SimpleNamespace(**{**vars(os), "access": access}))
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "write_report", lambda *_: True)
    monkeypatch.setattr(sys, "argv", ["run_course.py", *arguments])
    return runner.main(), ran


@pytest.mark.parametrize("is_there", [False, True])
def test_where_the_repository_is_read_only_lessons_make_their_data_elsewhere(
    is_there, monkeypatch, tmp_path
):
    runner, lessons = importlib.import_module("run_course"), ["create_mnist_h5", "11", "9"]
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "read_course", lambda: [LESSONS[name] for name in lessons])
    if is_there:  # somebody else has made it
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "mnist.h5").touch()
    _, ran = run_where_read_only(monkeypatch, tmp_path / "data", *lessons)
    told = {name for name in ran if ran[name] != LESSONS[name]["arguments"]}
    assert told == {"create_mnist_h5", *(() if is_there else ("11",))}
    assert ran["create_mnist_h5"][-2:] == ["--file", "data/mnist.h5"]
    for name, (option, _) in runner.MADE.items():
        assert f'add("{option}", type=' in (ROOT / LESSONS[name]["file"]).read_text()


def test_where_the_user_cannot_write_run_course_says_so_at_once(monkeypatch):
    with pytest.raises(SystemExit, match=r"^You cannot write to /.* Go to a folder of your own: /"):
        run_where_read_only(monkeypatch, ".", "0")


def test_run_course_refuses_what_it_does_not_know(tmp_path):
    done = run_course("day7", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("There is no lesson 'day7'. There are day1, day2 and " + ", ".join(LESSONS) + ".")
    )


@pytest.mark.parametrize("script", ["run_course.sh", "run_tests.sh"])
def test_help_says_how_to_use_it(script, tmp_path):
    command = [ROOT / "scripts" / script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0
    assert f"Usage: scripts/{script}" in done.stdout


def test_the_pages_are_up_to_date():
    command = [sys.executable, ROOT / "scripts" / "update_docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nothing_that_is_made_here_is_in_the_repository():
    if not works("git", "-C", ROOT, "status"):
        cannot("needs git, and a clone of one's own")
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == ""


def test_the_bare_part_has_each_file_in_which_something_may_be_skipped():
    part = re.search(r"^part='(.*?)'$", (ROOT / "tests" / "bare.sh").read_text(), re.M | re.S)[1]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q"]
    command += ["--collect-only", "-p", "no:cacheprovider", "-k", part.replace("\n", " ")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = set(re.findall(r"^(\S+\.py)::", done.stdout, re.M))
    skips = re.compile(
        r"\b(cannot|need|need_browser|need_slurm|browse|open_in_browser)\("
        r"|def test.*\b(slurm|breakable|cluster)[,)]"
    )
    files = (ROOT / "tests").rglob("test_*.py")
    may_skip = {str(x.relative_to(ROOT)) for x in files if skips.search(x.read_text())}
    assert len(may_skip) > 10
    assert may_skip - chosen == set()


def imported(path):
    """Return the modules of scripts/ that a file imports, as paths without the ending."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    paths = {name.replace(".", "/") for name in names}
    return {x for x in paths if (ROOT / "scripts" / f"{x}.py").exists()}


def test_the_scripts_import_only_downwards():
    """Commands import benchmark, checks and lib; these import lib; nothing imports a command."""
    scripts = ROOT / "scripts"
    files = {str(x.relative_to(scripts).with_suffix("")): x for x in scripts.rglob("*.py")}
    graph = {name: imported(path) for name, path in files.items()}
    assert sum(map(len, graph.values())) > 30
    below = {"": {"benchmark", "checks", "lib"}, "benchmark": {"lib"}, "checks": {"lib"}}
    for name, others in graph.items():
        folder = str(Path(name).parent).replace(".", "")
        allowed = below.get(folder, set()) | ({folder} if folder else set())
        assert {str(Path(other).parent) for other in others} <= allowed, f"{name}: {others}"
    # TopologicalSorter raises CycleError where modules import each other in a circle.
    assert set(TopologicalSorter(graph).static_order()) == set(files)
