"""What a user can do to a lesson: bad arguments, other folders, no network."""

import sys

import pytest
from faults import Job, refused
from support.run import LESSONS, ROOT, copy_tree, proves, skip_or_fail_in_ci, works


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("0 processes", (0,)),
        ("an unknown option", ("--no-such-option",)),
    ],
)
def test_a_wrong_argument_gets_one_sentence(fault, arguments):
    do = "`--help` after the file shows what it takes."
    refused(fault, "error: .*", do, "4", *arguments)


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
