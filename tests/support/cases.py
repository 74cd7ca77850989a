"""What makes each lesson short, and the data that some lessons write for others."""

from pathlib import Path

from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, cached_across_workers, output_of, proves

FEW = "--epochs 1 --max-steps 20"
# The proof line still says ok. {folder} is where the data of lesson 11 or 19 is, or will be.
SHORT = {
    "0": "",
    "1": "",
    "2": "",  # its defaults: the page promises 98%
    "3": FEW,
    "4": FEW,
    "5": "--max-steps 5",
    "6": FEW,
    "test-profile": "",
    "7": "--rounds 1 --max-steps 2 --batch-size 50",
    "8": "--images 3200",
    "9": "",
    "10": FEW,
    "create_mnist_h5": "--force --file {folder}/mnist.h5",
    "11": "--file {folder}/mnist.h5 --epochs 1 --max-steps 5",
    "12": "--images 1280 --batch-size 32 --save-every 4 --crash-at-step 6",
    "13": "2 1 --max-steps 6 --log-every 3",
    "create_ratings": "--force --folder {folder}/ratings --copies 3 --files 12",
    "19": "--folder {folder}/ratings --epochs 1 --batch-size 504 --lr 0.03",
    "20": "",
    "14": "--max-steps 20 --batch-size 16",
    "15": "--max-steps 12",
    "18": "",
    "16": "--max-steps 4",
    "17": "--max-steps 3",
}
ONE_PROCESS = ("2", "create_mnist_h5", "create_ratings")
READS = {"11": "create_mnist_h5", "19": "create_ratings"}  # what another lesson has written


def written_by(lesson_id, tmp_path_factory):
    """Return the folder in which a lesson has written its data, once for all tests."""

    def write():
        folder = tmp_path_factory.mktemp(lesson_id)
        arguments = SHORT[lesson_id].format(folder=folder).split()
        output = output_of(run_ranks(1, ROOT / LESSONS[lesson_id]["file"], *arguments, cwd=folder))
        assert proves(output), output
        return str(folder)

    return Path(cached_across_workers(tmp_path_factory, lesson_id, write))


def arguments_of(lesson_id, folder, tmp_path_factory):
    """Return what makes a lesson short, as a list. It reads what is written already."""
    if lesson_id in READS:
        folder = written_by(READS[lesson_id], tmp_path_factory)
    return SHORT[lesson_id].format(folder=folder).split()
