"""Runs lesson 13 with its check of the ranks at every step and without it, and compares the times.

Run: scripts/multinode_setup_and_run.sh --local 5 tests/faults/silent_cost.py [arguments of 13]

Both times are of the same run, on rank 0. Their difference is what the checks add: to wait in one
for the slowest rank costs nothing more, because the next step would wait for it all the same.
"""

import importlib.util
import statistics
import time
from pathlib import Path

import torch.distributed as dist

FILE = Path(__file__).parents[2] / "day2" / "13_mnist_ddp_recipe.py"
ROUNDS = 3
OFTEN, NEVER = 1, 10**9  # steps


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
    """Run on every rank: train in turns with a check at every step and with none."""
    checks, epochs = [], []
    LESSON.check_ranks = timed(LESSON.check_ranks, checks)
    LESSON.train_one_epoch = timed(LESSON.train_one_epoch, epochs)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.precision = "fp32"
    train_set, test_set = LESSON.load_mnist(args.data_dir)
    with_checks, without = [], []
    for _ in range(ROUNDS):
        for args.check_every, times in ((NEVER, without), (OFTEN, with_checks)):
            epochs.clear()
            LESSON.train(train_set, test_set, rank, world_size, args.lr, device, args)
            times.append(sum(epochs))
    if rank == 0:
        count = len(checks) // ROUNDS
        step = statistics.median(without) / count
        check = statistics.median(with_checks) / count - step
        print(
            f"checks: {len(checks)} without an alarm, {1000 * check:.1f} ms each, "
            f"a step {1000 * step:.1f} ms; every 100 steps: {check / step / 100:.2%} of the time"
        )


if __name__ == "__main__":
    LESSON.main = main
    LESSON.start(parse_args())
