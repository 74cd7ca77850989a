"""Runs lesson 13 and measures how much of its training the check of the ranks takes.

Run: scripts/multinode_setup_and_run.sh --local 5 tests/faults/silent_cost.py [arguments of 13]

Both times are of the same run, on rank 0. The time of a check includes waiting for the other ranks.
"""

import importlib.util
import time
from pathlib import Path

import torch.distributed as dist

FILE = Path(__file__).parents[2] / "day2" / "13_mnist_ddp_recipe.py"


def load_lesson():
    """Return lesson 13 as a module."""
    spec = importlib.util.spec_from_file_location("lesson_13", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LESSON = load_lesson()
parse_args = LESSON.parse_args


def timed(function, seconds):
    """Return a function that does the same and adds its time to a list."""

    def call(*arguments):
        begin = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def main(device, args):
    """Run on every rank: the lesson, with a clock around its check and its training."""
    checks, epochs = [], []
    LESSON.check_ranks = timed(LESSON.check_ranks, checks)
    LESSON.train_one_epoch = timed(LESSON.train_one_epoch, epochs)
    lesson_main(device, args)
    if dist.get_rank() == 0:
        share = sum(checks) / sum(epochs)
        print(
            f"checks: {len(checks)} without an alarm, {1000 * sum(checks) / len(checks):.1f} ms "
            f"each, {share:.2%} of the {sum(epochs):.1f} s of training"
        )


if __name__ == "__main__":
    lesson_main, LESSON.main = LESSON.main, main
    LESSON.start(parse_args())
