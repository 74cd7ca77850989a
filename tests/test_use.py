"""What a user can do to a lesson: bad arguments, missing data, other folders, Ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LESSONS, ROOT, processes_of, proves, run_lesson, start_lesson, wait_for

FEW = ("--epochs", 1, "--max-steps", 5)
# Those that take processes and have a parse_args of their own; the others have the same one.
PARSING = [
    name
    for name, lesson in LESSONS.items()
    if lesson["file"].startswith("day1")
    and name != "2"
    and "parse_args" in lesson["adds"] + lesson["changes"]
]


@pytest.mark.parametrize("lesson_id", PARSING)
def test_zero_processes_get_one_sentence(lesson_id, tmp_path):
    check_refusal(lesson_id, 0, tmp_path=tmp_path)


@pytest.mark.parametrize("processes", ["-1", "two"])
def test_a_wrong_number_of_processes_gets_one_sentence(processes, tmp_path):
    check_refusal("0", processes, tmp_path=tmp_path)


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
def test_a_wrong_option_gets_one_sentence(arguments, tmp_path):
    check_refusal("4", *arguments, tmp_path=tmp_path)


def check_refusal(lesson_id, *arguments, tmp_path):
    status, output = run_lesson(lesson_id, *arguments, cwd=tmp_path)
    assert status == 2
    assert "Traceback" not in output
    # argparse prints how to call the lesson, and then the sentence.
    *usage, sentence = output.strip().splitlines()
    assert usage[0].startswith("usage: ")
    assert "error: " in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lesson_id", "damage"),
    [("2", "folder missing"), ("4", "archive missing"), ("2", "truncated"), ("6", "one bit")],
)
def test_missing_or_damaged_data_gets_one_sentence(lesson_id, damage, tmp_path):
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
    status, output = run_lesson(lesson_id, "--data-dir", tmp_path / "data", cwd=tmp_path)
    assert status == 1
    (sentence,) = output.strip().splitlines()
    assert sentence == f"{archive} is missing or damaged. Restore it: git checkout data/MNIST"


def test_a_data_folder_that_cannot_be_written_is_enough(tmp_path):
    """Nothing is unpacked there, so a folder without write permission serves as well."""
    shutil.copytree(ROOT / "data" / "MNIST" / "raw", tmp_path / "data" / "MNIST" / "raw")
    before = sorted(tmp_path.joinpath("data").rglob("*"))
    folders = [path for path in (tmp_path / "data", *before) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        status, output = run_lesson("3", 1, *FEW, "--data-dir", tmp_path / "data", cwd=tmp_path)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert status == 0, output
    assert sorted(tmp_path.joinpath("data").rglob("*")) == before


def test_two_jobs_can_start_at_once(tmp_path):
    jobs = [start_lesson("3", 1, *FEW, cwd=tmp_path) for _ in range(2)]
    for job in jobs:
        output, _ = job.communicate(timeout=200)
        assert job.returncode == 0, output


def test_any_folder_and_paths_with_spaces_will_do(tmp_path):
    home = tmp_path / "my course"
    shutil.copytree(ROOT / "day1", home / "day1")
    shutil.copytree(ROOT / "data", home / "data")
    elsewhere = tmp_path / "somewhere else"
    elsewhere.mkdir()
    file = home / "day1" / "6_mnist_ddp_pt.py"
    status, output = run_lesson("6", 2, *FEW, cwd=elsewhere, file=file)
    assert status == 0, output
    assert proves("6", output)
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]


def test_no_network_is_needed(tmp_path):
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace, and the command ip")
    command = [*inside, sys.executable, str(ROOT / LESSONS["4"]["file"]), "2", *map(str, FEW)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert proves("4", done.stdout)


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
