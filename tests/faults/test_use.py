"""What a user can do to a lesson: bad arguments, other folders, old versions, no allocation."""

import os
import sys
from unittest import mock

import pytest
import torch
from catalogue import Job, lesson, refused, saw
from helpers import LAUNCHER, LESSONS, ROOT, cannot, copy_tree, load_lesson, proves, refusal, works

FEW = ("--epochs", 1, "--max-steps", 5)
# Those that take processes and have a parse_args of their own; the others have the same one.
PARSING = [
    name
    for name, lesson in LESSONS.items()
    if lesson["file"].startswith("day1")
    and name != "2"
    and "parse_args" in lesson["adds"] + lesson["changes"]
]
HELP = "`--help` after the file shows what it takes."


@pytest.mark.parametrize("lesson_id", PARSING)
def test_zero_processes_get_one_sentence(lesson_id):
    status, output = refusal(lesson_id, 0)
    assert status == 2
    assert output.strip().endswith(
        "error: argument processes: must be a whole number greater than 0, not 0"
    )


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("a negative number of processes", ("-1",)),
        ("processes that are not a number", ("two",)),
        ("a negative batch size", ("--batch-size", -3)),
        ("a learning rate that is no number", ("--lr", "nan")),
        ("a learning rate in words", ("--lr", "fast")),
        ("no steps", ("--max-steps", 0)),
        ("an unknown option", ("--no-such-option",)),
    ],
)
def test_a_wrong_argument_gets_one_sentence(fault, arguments):
    refused(fault, "error: .*", HELP, "4", *arguments)


def test_nothing_is_started_and_nothing_is_left_of_a_refused_command(tmp_path):
    job = lesson("4", 0, cwd=tmp_path)
    job.check(
        "0 processes",
        "error: argument processes: must be a whole number greater than 0, not 0",
        HELP,
        status=2,
    )
    assert list(tmp_path.iterdir()) == []


def test_any_folder_will_do_and_no_network_is_needed(tmp_path):
    """From elsewhere, in a path with spaces, the data not to be written to, without a network."""
    home = tmp_path / "my course"
    copy_tree(ROOT / "day1", home / "day1")
    copy_tree(ROOT / "data" / "MNIST" / "raw", home / "data" / "MNIST" / "raw")
    before = sorted(home.joinpath("data").rglob("*"))
    folders = [path for path in (home / "data", *before) if path.is_dir()]
    elsewhere = tmp_path / "somewhere else"
    elsewhere.mkdir()
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if not works(*inside, "true"):
        cannot("needs the right to make a network namespace, and the command ip")
    for folder in folders:
        folder.chmod(0o555)
    try:
        job = Job(*inside, sys.executable, home / LESSONS["6"]["file"], "2", *FEW, cwd=elsewhere)
        output = job.check(
            "another folder, data that is read-only, no network",
            "^=> .*",
            "Nothing. The lessons write `runs/` where you stand.",
            status=0,
        )
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert proves(output)
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]
    assert sorted(home.joinpath("data").rglob("*")) == before


def test_outside_an_allocation(tmp_path):
    env = {name: "" for name in os.environ if name.startswith("SLURM_")}
    job = Job(LAUNCHER, "9", cwd=tmp_path, env=env)
    output = job.check(
        "the launcher outside an allocation",
        r"^This is not inside a Slurm allocation\. Get one:$",
        "As it says.",
        status=1,
    )
    assert "salloc --nodes 2 " in output
    assert "scripts/multinode_setup_and_run.sh --local 2x2 9" in output


def test_python_is_too_old(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    job = Job(ROOT / "scripts" / "run_course.sh", "0", cwd=tmp_path, env={"PYTHON": str(old)})
    job.check(
        "Python is too old",
        r"^Python 3\.11 or newer is needed; \S+ is Python 3\.9\.2\. .*",
        "As it says.",
        status=1,
    )


@pytest.mark.parametrize(
    ("fault", "name", "version", "more", "sentence"),
    [
        (
            "torch is too old",
            "torch",
            "2.5.1",
            "",
            r"^torch 2\.6 or newer is needed; .* has 2\.5\.1",
        ),
        (
            "torchvision is not made for this torch",
            "torchvision",
            "0.20.1",
            "Requires-Dist: torch==2.5.1\n",
            r"^torchvision 0\.20\.1 is made for torch 2\.5\.1; .*",
        ),
    ],
)
def test_versions_that_do_not_fit(fault, name, version, more, sentence, tmp_path):
    """Only the notes of an installed package are wrong here: nothing of it is imported."""
    notes = tmp_path / "packages" / f"{name}-{version}.dist-info" / "METADATA"
    notes.parent.mkdir(parents=True)
    notes.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
    env = {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "packages")}
    job = Job(ROOT / "scripts" / "run_course.sh", "0", cwd=tmp_path, env=env)
    job.check(fault, sentence, "As it says.", status=1)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "nccl"), (3, "gloo")])
def test_more_ranks_than_gpus_share_them_through_gloo(ranks, backend):
    """There are no GPUs here: PyTorch is made to say that there are two."""
    fake = mock.Mock(
        **{
            "is_available.return_value": True,
            "current_accelerator.return_value": torch.device("cuda"),
            "device_count.return_value": 2,
        }
    )
    with mock.patch.object(torch, "accelerator", fake):
        chosen = [load_lesson("4").choose_device(rank, ranks) for rank in range(ranks)]
    assert chosen == [(torch.device("cuda", rank % 2), backend) for rank in range(ranks)]
    if backend == "gloo":
        says = f"device: cuda, backend: {backend}"
        saw("more ranks than GPUs (imitated)", says, "Nothing: they share them.", says, None)
