"""Files that are missing, damaged, hostile or half written, and disks that are full."""

import os
import subprocess

import h5py
import pytest
import torch
from faults import lesson, nine_images, saw
from support.forked_ranks import run_ranks
from support.run import (
    ALONE,
    LESSONS,
    ROOT,
    copy_tree,
    full,
    load_lesson,
    skip_or_fail_in_ci,
    wait_for,
    works,
)

COPY = "Copy everything again from one place."
# Each rank stands in a folder of its own, as if it had a node with a disk of its own.
IN_OWN_FOLDER = """
import os, runpy, sys
os.chdir(os.environ["RANK"])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("fault", "row", "says"),
    [
        ("fewer ratings than files need", "1,2,3.5,4", "^5 ratings are too few for 3 files: .*"),
        ("a rating that is no number", "1,2,good,4", "line 7: could not convert string 'good'"),
    ],
)
def test_a_csv_that_cannot_be_used(fault, row, says, tmp_path):
    rows = ["userId,movieId,rating,timestamp", "", *["1,2,3.5,4"] * 4, row]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    options = ("--csv", "own.csv", "--folder", "few", "--files", 3)
    job = lesson("create_ratings", *options, cwd=tmp_path)
    job.check(f"create_ratings.py: {fault}", says, "As it says.", status=1)
    assert not (tmp_path / "few").exists()


def write_copies(folder, lesson_id):
    """Write the data of a lesson in the folders of two ranks, not quite the same."""
    for rank in "01":
        (folder / rank).mkdir()
        if lesson_id == "11":
            with h5py.File(nine_images(folder / rank), "a") as file:
                file["labels"][8] = int(rank)
        else:
            copy_tree(ROOT / "data" / "MNIST", folder / rank / "MNIST")
            images = folder / rank / "MNIST" / "raw" / "train-images-idx3-ubyte"
            with images.open("r+b") as file:
                file.seek(16 + 14 * 28)  # one pixel of the first image
                file.write(bytes([int(rank)]))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("11 --file nine.h5 --batch-size 1", r"h5 is not the same on ranks \[1\] as on"),
        (
            "13 --data .",
            "^this is another training: rank 0 has 'train: .*, rank 1 has 'train: ",
        ),
    ],
)
def test_copies_of_the_data_that_differ(command, says, tmp_path):
    lesson_id, *arguments = command.split()
    write_copies(tmp_path, lesson_id)
    (tmp_path / "own.py").write_text(IN_OWN_FOLDER)
    file = ROOT / LESSONS[lesson_id]["file"]
    env = {"CHECKPOINT_DIR": str(tmp_path / "runs")}
    arguments = (tmp_path / "own.py", file, *arguments)
    status, output = run_ranks(2, *arguments, cwd=tmp_path, env=env)
    assert status == 1, output
    assert "Traceback" not in output
    saw(f"lesson {lesson_id}: each rank has its own copy, and they differ", says, COPY, output)


@pytest.mark.parametrize("how", ["INT", full("KILL")])
def test_writing_that_is_stopped_leaves_the_old_file(how, tmp_path):
    path = tmp_path / "mnist.h5"
    path.write_text("precious")
    job = lesson("create_mnist_h5", "--file", path, "--force", "--copies", 50, cwd=tmp_path)
    assert wait_for(lambda: list(tmp_path.glob(".mnist.h5.*")), 100), job.output
    job.hit(how)
    if how == "KILL":  # that gives it no time to tidy up
        job.process.wait()
        (half,) = tmp_path.glob(".mnist.h5.*")
        half.unlink()
    do = "Nothing: the old file is there. KILL also leaves a `.mnist.h5.<number>` to delete."
    job.check(f"create_mnist_h5.py is stopped by {how}", None, do)
    assert path.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("size", "command", "says"),
    [
        full("20m", "create_mnist_h5 --file mnist.h5", "No space left on device$"),
        ("300k", "12 --images 640 --save-every 2", r"Is the disk full\?$"),
    ],
)
def test_a_full_disk(size, command, says, tmp_path):
    """The folder where the lesson starts is a small disk in memory."""
    if os.geteuid() or not works("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", tmp_path):
        skip_or_fail_in_ci("needs the right to mount")
    name, *options = command.split()
    job = lesson(name, *options, cwd=tmp_path, env=ALONE)
    do = "`df -h .` shows what is free. Lesson 12 goes on from the snapshot before."
    try:
        job.check(
            f"the disk is full: lesson {name}", rf"^\S+ could not be written.*{says}", do, status=1
        )
    finally:
        subprocess.run(["umount", tmp_path], check=True)


BEFORE = "Nothing: lesson 12 goes on from the snapshot before."


class Hostile:
    """Unpickled, it runs a command."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


@pytest.mark.parametrize("damage", ["truncated", "one bit wrong", "code"])
def test_the_newest_whole_snapshot_is_loaded(damage, tmp_path, capsys, monkeypatch):
    lesson = load_lesson("12")
    monkeypatch.setattr(lesson.dist, "get_rank", lambda: 0)
    path, sign = tmp_path / "snapshot.pt", tmp_path / "code has run"
    assert lesson.load(path) is None
    for epoch in (0, 1):
        lesson.save({"epoch": epoch, "model": {"weight": torch.arange(1000.0)}}, path)
    assert lesson.load(path)["epoch"] == 1
    assert capsys.readouterr().out == ""
    whole = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "one bit wrong":
        whole[whole.index(torch.arange(1000.0).numpy().tobytes()) + 2000] ^= 1
        path.write_bytes(whole)
    else:
        torch.save({"epoch": 2, "more": Hostile(sign)}, path)
    assert lesson.load(path)["epoch"] == 0
    said = capsys.readouterr().out
    saw(f"a snapshot: {damage}", r"^\S+ cannot be used: [^.\n]+", BEFORE, said)
    assert not sign.exists()
