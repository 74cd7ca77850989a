"""What a user can do to a lesson: bad arguments, missing data, other folders, Ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import (
    LESSONS,
    ROOT,
    cannot,
    load_lesson,
    processes_of,
    proves,
    refusal,
    run_lesson,
    start_lesson,
    wait_for,
)

FEW = ("--epochs", 1, "--max-steps", 5)
# Those that take processes and have a parse_args of their own; the others have the same one.
PARSING = [
    name
    for name, lesson in LESSONS.items()
    if lesson["file"].startswith("day1")
    and name != "2"
    and "parse_args" in lesson["adds"] + lesson["changes"]
]


def check_refusal(status, output):
    """Assert that the output is how to call the lesson, and one sentence."""
    assert status == 2
    assert "Traceback" not in output
    *usage, sentence = output.strip().splitlines()
    assert usage[0].startswith("usage: ")
    assert "error: " in sentence


@pytest.mark.parametrize("lesson_id", PARSING)
def test_zero_processes_get_one_sentence(lesson_id):
    check_refusal(*refusal(lesson_id, 0))


@pytest.mark.parametrize("processes", ["-1", "two"])
def test_a_wrong_number_of_processes_gets_one_sentence(processes):
    check_refusal(*refusal("0", processes))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--batch-size", -3),
        ("--lr", "nan"),
        ("--lr", "fast"),
        ("--max-steps", 0),
        ("--no-such-option",),
    ],
)
def test_a_wrong_option_gets_one_sentence(arguments):
    check_refusal(*refusal("4", *arguments))


def test_nothing_is_started_and_nothing_is_left_of_a_refused_command(tmp_path):
    check_refusal(*run_lesson("4", 0, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["folder missing", "archive missing", "truncated", "one bit"])
def test_missing_or_damaged_data_gets_one_sentence(damage, tmp_path):
    shutil.copytree(ROOT / "data" / "MNIST" / "raw", tmp_path / "data" / "MNIST" / "raw")
    archive = tmp_path / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    archive.chmod(0o644)
    whole = archive.read_bytes()
    if damage == "folder missing":
        shutil.rmtree(tmp_path / "data")
    elif damage == "archive missing":
        archive.unlink()
    elif damage == "truncated":
        archive.write_bytes(whole[: len(whole) // 2])
    else:
        archive.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    sentence = f"{archive} is missing or damaged. Restore it: git checkout data/MNIST"
    with pytest.raises(SystemExit) as end:
        load_lesson("4").load_mnist(tmp_path / "data")
    assert end.value.code == sentence
    if damage == "folder missing":
        status, output = run_lesson("4", "--data-dir", tmp_path / "data", cwd=tmp_path)
        assert (status, output.strip()) == (1, sentence)


def test_two_jobs_can_start_at_once(tmp_path):
    jobs = [start_lesson("3", 1, *FEW, cwd=tmp_path) for _ in range(2)]
    for job in jobs:
        output, _ = job.communicate(timeout=200)
        assert job.returncode == 0, output


def test_any_folder_will_do_and_no_network_is_needed(tmp_path):
    """From elsewhere, in a path with spaces, the data not to be written to, without a network."""
    home = tmp_path / "my course"
    shutil.copytree(ROOT / "day1", home / "day1")
    shutil.copytree(ROOT / "data" / "MNIST" / "raw", home / "data" / "MNIST" / "raw")
    before = sorted(home.joinpath("data").rglob("*"))
    folders = [path for path in (home / "data", *before) if path.is_dir()]
    elsewhere = tmp_path / "somewhere else"
    elsewhere.mkdir()
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        cannot("needs the right to make a network namespace, and the command ip")
    lesson = home / LESSONS["6"]["file"]
    command = [*inside, sys.executable, str(lesson), "2", *map(str, FEW)]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=200)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert proves("6", done.stdout)
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]
    assert sorted(home.joinpath("data").rglob("*")) == before


@pytest.mark.parametrize("how", ["ctrl-c", "kill -TERM", "kill -KILL"])
def test_a_job_that_is_stopped_leaves_no_process(how, tmp_path):
    job = start_lesson("4", 3, "--epochs", 100_000, "--max-steps", 5, cwd=tmp_path)
    assert job.stdout.readline().startswith("ranks: 3")
    assert job.stdout.readline().startswith("epoch 0")
    if how == "ctrl-c":  # the terminal sends it to every process in the foreground
        os.killpg(job.pid, signal.SIGINT)
    else:
        job.send_signal(getattr(signal, "SIG" + how.removeprefix("kill -")))
    ended = wait_for(lambda: job.poll() is not None and not processes_of(job.pid), 5)
    left = processes_of(job.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    output = job.communicate()[0]
    assert ended, f"after 5 s these are left: {left}"
    assert job.returncode != 0
    assert "Traceback" not in output


@pytest.mark.parametrize("victim", [1])
def test_a_killed_rank_ends_the_job_and_is_named(victim, tmp_path):
    job = start_lesson("4", 3, "--epochs", 100_000, "--max-steps", 5, cwd=tmp_path)
    assert job.stdout.readline().startswith("ranks: 3")
    assert job.stdout.readline().startswith("epoch 0")
    os.kill(rank_process(job.pid, victim), signal.SIGKILL)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 1
    sentence = f"ProcessExitedException: process {victim} terminated with signal SIGKILL"
    assert any(line.endswith(sentence) for line in output.splitlines())
    assert wait_for(lambda: not processes_of(job.pid), 5)


def rank_process(session, rank):
    """Return the process id of a rank. The ranks are started in order, so their ids rise."""
    parents = {
        pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in processes_of(session)
    }
    # The lesson starts Python's fork server, and that starts the ranks.
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == session)[rank]


def test_the_rank_that_raised_is_the_one_reported(tmp_path):
    text = (ROOT / LESSONS["0"]["file"]).read_text()
    line = "    before = value.item()\n"
    assert line in text
    broken = tmp_path / "broken.py"
    broken.write_text(
        text.replace(line, line + '    if rank == 2:\n        raise ValueError("ouch")\n')
    )
    status, output = run_lesson("0", 4, cwd=tmp_path, file=broken, timeout=30)
    assert status == 1
    assert "-- Process 2 terminated with the following error:" in output
    assert output.strip().splitlines()[-1] == "ValueError: ouch"
