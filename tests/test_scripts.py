"""The commands in scripts/."""

import re
import shutil
import subprocess
import sys

import pytest
from helpers import LESSONS, ROOT


def run_course(*arguments, root=ROOT, cwd):
    command = [sys.executable, str(root / "scripts" / "run_course.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def test_run_course_shows_the_proof_of_each_lesson(tmp_path):
    done = run_course("9", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.rpartition("what it showed")[2]
    assert re.search(r"^ +9  => 2 nodes, 4 ranks: every rank holds .*  ok$", table, re.M)
    assert "1 of 1 lessons ok" in table


def test_run_course_fails_when_a_lesson_does(tmp_path):
    shutil.copytree(ROOT / "day1", tmp_path / "day1")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    lesson = tmp_path / "day1" / "0_torch_dist.py"
    key_line = "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n"
    lesson.write_text(lesson.read_text().replace(key_line, ""))
    done = run_course("0", root=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "its proof line is missing or wrong" in done.stdout
    assert "0 of 1 lessons ok" in done.stdout
    report = (tmp_path / "runs" / "report.html").read_text()
    assert '<span class="state problem">its proof line is missing or wrong</span>' in report


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


def test_the_readmes_are_up_to_date():
    command = [sys.executable, ROOT / "scripts" / "update_docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_in_the_readmes_name_files_that_exist():
    for page in [ROOT / "README.md", *ROOT.glob("day*/README.md")]:
        commands = re.findall(r"^(?:\./|python )(\S+)", page.read_text(), re.M)
        assert commands
        for name in commands:
            assert (ROOT / name).exists(), f"{page}: {name}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nothing_that_is_made_here_is_in_the_repository():
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == ""
