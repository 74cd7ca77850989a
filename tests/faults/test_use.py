"""What a user can do to a lesson: bad arguments and files, other folders, no network."""

import argparse
import os
import sys
from unittest import mock

import pytest
from catalog import load
from faults import Job, nine_images, refused
from support.cases import written_by
from support.run import (
    ALONE,
    LESSONS,
    ROOT,
    copy_tree,
    load_lesson,
    proves,
    skip_or_fail_in_ci,
    works,
)

FILE = "As it says. The lesson's own file is made by `python day2/create_mnist_h5.py`."
OPTIONS = "`--help` after the file shows what it takes."
SHARE = r"15_\S+: error: 3 ranks cannot share 32 pieces of text and 64 rows evenly$"
NO_BATCH = r"nine\.h5 has not one batch for each worker of each rank$"
MISSING = r"unable to open file(?=.*Make it: python day2/create_mnist_h5)"
CHUNKS = "it must have images in chunks"


@pytest.mark.parametrize(
    ("fault", "command", "ranks", "says", "do"),
    [
        ("an unknown option", "4 --no-such-option", 1, "error: .*", OPTIONS),
        ("lesson 15: 3 ranks", "15", 3, SHARE, "1, 2 or 4 ranks."),
        ("lesson 11: 9 images, 8 ranks", "11 --file nine.h5", 8, NO_BATCH, "Or more images."),
    ],
)
def test_what_cannot_work_is_refused(fault, command, ranks, says, do, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nine_images(tmp_path)
    refused(fault, says, do, *command.split(), env=ALONE | {"WORLD_SIZE": str(ranks)})


@pytest.mark.parametrize(
    ("damage", "instead", "says"),
    [
        ("missing", None, MISSING),
        ("other data", {"images": None}, "object 'images' doesn't exist"),
        ("no chunks", {"images": range(9)}, CHUNKS),
        ("fewer labels", {"labels": range(7)}, f"{CHUNKS}, and as many labels$"),
    ],
)
def test_lesson_11_says_what_is_wrong_with_a_file(damage, instead, says, tmp_path):
    path = tmp_path / "nine.h5" if instead is None else nine_images(tmp_path, **instead)
    # No word of --force: the file that you have named is your own.
    sentence = rf"nine\.h5 cannot be streamed: (?!.*--force).*?{says}"
    refused(f"lesson 11: HDF5 file {damage}", sentence, FILE, "11", "--file", path, env=ALONE)


def test_lesson_19_refuses_a_folder_that_lacks_a_file(tmp_path, tmp_path_factory):
    copy_tree(written_by("create_ratings", tmp_path_factory) / "ratings", tmp_path / "ratings")
    (tmp_path / "ratings" / "0003.npy").unlink()
    says = r"\S+ has 11 of its 12 files\. Copy it again$"
    folder = ("--folder", tmp_path / "ratings")
    fault, do = "lesson 19: a file is missing", "Copy everything again from one place."
    refused(fault, says, do, "19", *folder, env=ALONE)


# May be 0. All other numbers of lessons must be more.
FROM_0 = {"seed", "warm_up", "workers", "factors", "profile"}
TOO_SMALL_OR_LARGE = ["-1", "nan", "inf", "1" + "0" * 26]


@pytest.mark.parametrize("lesson_id", [x for x in LESSONS if hasattr(load_lesson(x), "parse_args")])
def test_a_number_that_cannot_work_is_refused(lesson_id, monkeypatch, capsys):
    """Each number of a lesson: an option's, the number of processes, and DIST_TIMEOUT."""
    lesson = load_lesson(lesson_id)
    monkeypatch.setenv("LOCAL_RANK", "0")

    def refuses(*arguments):
        monkeypatch.setattr(sys, "argv", ["lesson", *arguments])
        with pytest.raises(SystemExit, match="2"):
            lesson.parse_args()
        assert len(capsys.readouterr().err.splitlines()[-1].split(": error: ")) == 2

    parse = mock.create_autospec(argparse.ArgumentParser.parse_args, side_effect=SystemExit)
    with mock.patch("argparse.ArgumentParser.parse_args", parse), pytest.raises(SystemExit):
        lesson.parse_args()
    actions = parse.call_args.args[0]._actions
    for action in actions:
        if action.type in (int, float):
            values = {*TOO_SMALL_OR_LARGE, "0"} - ({"0"} if action.dest in FROM_0 else set())
            if action.dest == "clip":  # nothing is clipped
                values -= {"inf", "1" + "0" * 26}
            for value in values:
                refuses(f"{action.option_strings[0]}={value}" if action.option_strings else value)
    if any(action.dest == "processes" for action in actions):
        refuses("2000")
        for value in ["0", "abc", *TOO_SMALL_OR_LARGE]:
            monkeypatch.setenv("DIST_TIMEOUT", value)
            refuses()
        monkeypatch.delenv("DIST_TIMEOUT")
        monkeypatch.setenv("WORLD_SIZE", "2")
        refuses("50")  # torchrun has started two


BAD = [
    ("scripts/compare_losses", "a b --steps -5"),
    ("scripts/compare_losses", "a b --limit nan"),
    ("scripts/predict_step", "--parameters 25e6 --samples 64 --step-ms nan"),
    ("scripts/predict_step", "--parameters 1e300 --samples 64 --step-ms 100"),
    ("day2/count_step", "8B --tensor 3"),
    ("day2/count_step", "8B --shards -1"),
]


@pytest.mark.parametrize(("script", "arguments"), BAD)
def test_a_script_refuses_what_it_cannot_compute(script, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        load(f"{script}.py").main()
    assert ".py: error: " in capsys.readouterr().err.splitlines()[-1]


def test_nothing_is_replaced_but_with_force_what_an_earlier_run_wrote(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    ratings = tmp_path / "ratings"
    ratings.mkdir()
    for name in ("0000.npy", "thesis.txt"):
        (ratings / name).write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for lesson_id, options, says in (
        ("create_mnist_h5", ["--file", tmp_path / "fifo", "--force"], "fifo is no ordinary file"),
        ("create_mnist_h5", ["--file", ratings / "thesis.txt"], "already exists.*: --force"),
        ("create_ratings", ["--folder", ratings], "already exists.*: --force"),
        ("create_ratings", ["--folder", ratings, "--force"], "it holds other files"),
        ("create_ratings", ["--folder", tmp_path / "fifo", "--force"], "written: .*Not a dir"),
        ("create_ratings", ["--folder", tmp_path / "no" / "such"], "written: .*No such"),
    ):
        lesson = load_lesson(lesson_id)
        argv = ["lesson", *map(str, options)]
        with mock.patch.object(sys, "argv", argv), pytest.raises(SystemExit, match=says):
            lesson.main(lesson.parse_args())
    assert sorted(tmp_path.rglob("*")) == before


def test_any_folder_will_do_and_no_network_is_needed(tmp_path):
    """From elsewhere, in a path with spaces, the data not to be written to, without a network."""
    home, elsewhere = tmp_path / "my course", tmp_path / "somewhere else"
    copy_tree(ROOT / "day1", home / "day1")
    copy_tree(ROOT / "data" / "MNIST" / "raw", home / "data" / "MNIST" / "raw")
    elsewhere.mkdir()
    before = sorted(home.joinpath("data").rglob("*"))
    folders = [path for path in (home / "data", *before) if path.is_dir()]
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if not works(*inside, "true"):
        skip_or_fail_in_ci("needs the right to make a network namespace, and the command ip")
    for folder in folders:
        folder.chmod(0o555)
    few = ("--epochs", 1, "--max-steps", 5)
    job = Job(*inside, sys.executable, home / LESSONS["6"]["file"], "2", *few, cwd=elsewhere)
    fault = "another folder, data that is read-only, no network"
    do = "Nothing. The lessons write `runs/` where you stand."
    output = job.check(fault, "^=> .*", do, status=0)
    for folder in folders:
        folder.chmod(0o755)
    assert proves(output)
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]
    assert sorted(home.joinpath("data").rglob("*")) == before
