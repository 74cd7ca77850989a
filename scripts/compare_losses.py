"""Are two trainings the same? Compare the losses that they wrote for TensorBoard.

The first ten steps decide: ranks or batches of other sizes round differently, and once that has
switched one ReLU, the difference grows. How far it has grown is said, too.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from loss_curves import losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a folder, as of lesson 13")
    parser.add_argument("--steps", type=int, default=10, help="that decide (10)")
    parser.add_argument("--limit", type=float, default=1e-5, help="for bf16 2e-3 (1e-05)")
    args = parser.parse_args()
    if args.steps < 1 or not 0 <= args.limit < np.inf:
        parser.error("--steps must be at least 1, and --limit 0 or more")
    own, other = (read(folder) for folder in args.runs)
    both = [step for step in own if step in other]
    if not both:
        sys.exit(f"{args.runs[0]} and {args.runs[1]} have no step in common")
    size = np.max(np.abs([other[step] for step in both[: args.steps]])) or 1
    gaps = [abs(own[step] - other[step]) / size for step in both]
    gap, whole = np.max(gaps[: args.steps]), np.max(gaps)  # nan if a loss is no number
    holds = gap <= args.limit
    print(
        f"=> losses of {min(args.steps, len(both))} steps within {gap:.0e} of the largest "
        f"(limit {args.limit:.0e}), of {len(both)} within {whole:.0e}: {'ok' if holds else 'WRONG'}"
    )
    return 0 if holds else 1


def read(folder):
    """Return the losses in a folder of TensorBoard's files, {step: loss}; exit if it has none."""
    if not folder.exists():
        sys.exit(f"there is no {folder}")
    try:
        return dict(losses(folder, "loss"))
    except (KeyError, ValueError):
        sys.exit(f"{folder} has no loss that was written for TensorBoard")


if __name__ == "__main__":
    sys.exit(main())
