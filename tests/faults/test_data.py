"""Files that are missing, damaged, half written or read-only, and disks that are full."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import h5py
import pytest
import torch
from catalogue import Job, lesson, nine_images, refused
from helpers import ALONE, LESSONS, ROOT, cannot, copy_tree, refusal, works

RESTORE = "As it says, in the folder of the repository."
MAKE = "As it says. With `--force` a file that is there is replaced."
FULL = "`df -h .` shows what is free."
TINY = ("--images", 640, "--save-every", 2)


@pytest.mark.parametrize("damage", ["folder missing", "file missing", "truncated"])
@pytest.mark.parametrize("lesson_id", ["4", "10"])
def test_missing_or_damaged_data_gets_one_sentence(lesson_id, damage, tmp_path):
    folder = tmp_path / "data"
    copy_tree(ROOT / "data" / "MNIST" / "raw", folder / "MNIST" / "raw")
    file = folder / "MNIST" / "raw" / "train-images-idx3-ubyte"
    if damage == "folder missing":
        shutil.rmtree(folder)
    elif damage == "file missing":
        file.unlink()
    else:
        os.truncate(file, 1_000_000)
    sentence = f"{file} is missing or damaged. Restore it: git checkout data/MNIST"
    if lesson_id == "4" and damage == "folder missing":
        job = lesson("4", 2, "--data-dir", folder, cwd=tmp_path)
        says = r"error: argument --data-dir: \S+ is missing or damaged\. Restore it: .*"
        output = job.check("the data is missing", says, RESTORE, status=2)
    else:
        status, output = refusal(lesson_id, "--data-dir", folder, env=ALONE)
        assert status == 2
    assert output.endswith(f"error: argument --data-dir: {sentence}\n")
    assert "Traceback" not in output


def test_the_first_rank_of_a_node_says_that_data_is_missing(tmp_path):
    env = ALONE | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert refusal("10", "--data-dir", tmp_path, env=env) == (2, "")


def test_two_jobs_read_the_data_at_once(tmp_path):
    files = [tmp_path / name for name in ("a.h5", "b.h5")]
    jobs = [lesson("create_mnist_h5", "--file", file, cwd=tmp_path) for file in files]
    for job in jobs:
        job.check(
            "two jobs read the data at once",
            r"60,000 images of 28 x 28 .*$",
            "Nothing: reading changes nothing.",
            status=0,
        )
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "not HDF5", "other data", "other shape"]
)
def test_lesson_11_refuses_a_file_with_a_sentence(damage, tmp_path):
    path = nine_images(tmp_path)
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "not HDF5":
        path.write_text("no")
    else:
        with h5py.File(path, "w") as file:
            if damage == "other shape":
                file["images"] = torch.zeros(9, 32, 32, dtype=torch.uint8).numpy()
                file["labels"] = torch.zeros(9).numpy()
    sentence = r"\S+ is missing, damaged or of another kind\. Make it: .*"
    refused(f"lesson 11: HDF5 file {damage}", sentence, MAKE, "11", "--file", path, env=ALONE)


@pytest.mark.parametrize("how", ["INT", "TERM", "KILL"])
def test_writing_that_is_stopped_leaves_the_old_file(how, tmp_path):
    path = tmp_path / "mnist.h5"
    path.write_text("precious")
    job = lesson("create_mnist_h5", "--file", path, "--force", "--copies", 50, cwd=tmp_path)
    job.until_file(".mnist.h5.*")
    job.process.send_signal(getattr(signal, f"SIG{how}"))
    if how == "KILL":  # that gives it no time to tidy up
        job.process.wait()
        (half,) = tmp_path.glob(".mnist.h5.*")
        half.unlink()
    job.check(
        f"create_mnist_h5.py is stopped by {how}",
        None,
        "Nothing: the old file is there. KILL also leaves a `.mnist.h5.<number>` to delete.",
    )
    assert path.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@contextlib.contextmanager
def mounted(folder, *options):
    """Mount something on a folder for a while."""
    folder.mkdir()
    if os.geteuid() or not works("mount", *options, folder):
        cannot("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def small_disk(folder, size):
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def test_no_room_for_an_hdf5_file(tmp_path):
    with small_disk(tmp_path / "disk", "20m") as disk:
        job = lesson("create_mnist_h5", "--file", disk / "mnist.h5", cwd=tmp_path)
        job.check(
            "the disk is full: HDF5 file",
            "could not be written: No space left on device$",
            FULL,
            status=1,
        )
        assert list(disk.iterdir()) == []


ENLARGE = "As it says. `df -h /dev/shm` shows what is free."
TOO_FULL = r"^/dev/shm is too full: [\d.]+ MB are needed there, [\d.]+ are free\. .* --shm-size=1g$"


def with_shared_memory(size, lesson_id, *arguments):
    """Return a command that runs a lesson with so much shared memory, as a container has it."""
    script = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh", size]
    if not works(*before, "true"):
        cannot("needs the right to make a mount namespace")
    command = (*before, sys.executable, ROOT / LESSONS[lesson_id]["file"], *arguments)
    return [str(x) for x in command]


@pytest.fixture(scope="module")
def h5_file(tmp_path_factory):
    """A file for lesson 11 with chunks as large as create_mnist_h5.py makes them."""
    path = tmp_path_factory.mktemp("h5") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (20_000, 28, 28), "u1", chunks=(256, 28, 28))
        file.create_dataset("labels", (20_000,), "i8")
        file.create_dataset("test_images", (100, 28, 28), "u1", chunks=(100, 28, 28))
        file.create_dataset("test_labels", (100,), "i8")
    return path


def test_little_shared_memory_for_the_workers(h5_file, tmp_path):
    command = with_shared_memory("1m", "11", "--file", h5_file, "--batch-size", 1024)
    job = Job(*command, cwd=tmp_path, env=ALONE)
    output = job.check("/dev/shm is full: lesson 11 with workers", TOO_FULL, ENLARGE, status=1)
    assert output.count("\n") == 1
    # The first rank of a node has said it for all of them.
    env = {**os.environ, **ALONE, "LOCAL_RANK": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize(
    ("size", "lesson_id", "more"),
    [
        ("6600k", "11", ("--stream-only", "--batch-size", 1024, "--workers", 2)),
    ],
)
def test_as_much_shared_memory_as_a_lesson_asks_for_is_enough(
    size, lesson_id, more, h5_file, tmp_path
):
    """It asks for 6.6 MB; a tmpfs counts in MiB."""
    more = (*more, "--file", h5_file) if lesson_id == "11" else more
    command = with_shared_memory(size, lesson_id, *more, "--epochs", 1)
    env = {**os.environ, **ALONE}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n=> " in done.stdout


def test_no_room_for_a_snapshot(tmp_path):
    with small_disk(tmp_path / "disk", "300k") as disk:
        job = lesson("12", *TINY, cwd=disk, env=ALONE)
        job.check(
            "the disk is full: snapshot of lesson 12",
            r"^\S+ could not be written\. Is the disk full\?$",
            FULL + " Then the same command: it goes on from the snapshot before.",
            status=1,
        )


def test_no_room_for_a_trace(tmp_path):
    with small_disk(tmp_path / "disk", "200k") as disk:
        job = lesson("test-profile", 1, cwd=disk)
        job.check(
            "the disk is full: trace",
            r"^RuntimeError: \S+ is not whole\. Is the disk full\?$",
            FULL + " The trace ends in the middle.",
            status=1,
        )


def test_a_folder_that_cannot_be_written_to(tmp_path):
    with mounted(tmp_path / "folder", "-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        job = lesson("12", *TINY, cwd=folder, env=ALONE)
        job.check(
            "the folder where you stand is read-only",
            r"OSError: \[Errno 30\] Read-only file system: 'runs'$",
            "Start the lesson in a folder of your own.",
            status=1,
        )
