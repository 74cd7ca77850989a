"""Files that are missing, damaged, half written or read-only, and disks that are full."""

import contextlib
import os
import shutil
import signal
import subprocess

import h5py
import pytest
import torch
from catalogue import lesson, nine_images, refused
from helpers import ALONE, ROOT, cannot, load_lesson

RESTORE = "As it says, in the folder of the repository."
MAKE = "As it says. With `--force` a file that is there is replaced."
FULL = "`df -h .` shows what is free."
TINY = ("--made-up", 640, "--save-every", 2)


@pytest.mark.parametrize("damage", ["folder missing", "archive missing", "truncated", "one bit"])
def test_missing_or_damaged_data_gets_one_sentence(damage, tmp_path):
    shutil.copytree(ROOT / "data" / "MNIST" / "raw", tmp_path / "data" / "MNIST" / "raw")
    archive = tmp_path / "data" / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    archive.chmod(0o644)
    whole = archive.read_bytes()
    if damage == "folder missing":
        shutil.rmtree(tmp_path / "data")
        job = lesson("4", 2, "--data-dir", tmp_path / "data", cwd=tmp_path)
        output = job.check(
            "the data is missing", r"\S+ is missing or damaged\. Restore it: .*", RESTORE, status=1
        )
        assert output == f"{archive} is missing or damaged. Restore it: git checkout data/MNIST\n"
        return
    if damage == "archive missing":
        archive.unlink()
    elif damage == "truncated":
        archive.write_bytes(whole[: len(whole) // 2])
    else:
        archive.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(SystemExit) as end:
        load_lesson("4").load_mnist(tmp_path / "data")
    sentence = f"{archive} is missing or damaged. Restore it: git checkout data/MNIST"
    assert end.value.code == sentence


def test_two_jobs_unpack_the_data_at_once(tmp_path):
    files = [tmp_path / name for name in ("a.h5", "b.h5")]
    jobs = [lesson("create_mnist_h5", "--file", file, cwd=tmp_path) for file in files]
    for job in jobs:
        job.check(
            "two jobs unpack the archives at once",
            r"60,000 images of 28 x 28 .*$",
            "Nothing: each job unpacks for itself.",
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
    if os.geteuid() or subprocess.run(["mount", *options, folder], capture_output=True).returncode:
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
