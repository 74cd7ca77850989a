"""Write movie ratings into many files, called shards, for lesson 14 to stream from.

Builds on: create_mnist_h5.py
New here:  shard, shuffling more than memory holds
Run:       python day2/create_ratings.py [--copies 200]
Look for:  => 1,008,360 ratings in 64 files, of users 1 to 6,100 and movies 1 to 9,724
Try next:  real ratings: python scripts/get_movielens.py, then --csv and the file it has written.
"""

import argparse
import json
import os
import shutil
import sys
from itertools import islice
from pathlib import Path

import numpy as np

USERS, MOVIES, RATINGS = 610, 9_724, 100_836  # as in MovieLens ml-latest-small
COLUMNS = np.dtype([("userId", "<i4"), ("movieId", "<i4"), ("rating", "<f4"), ("timestamp", "<u4")])


def generate(copies, seed, factors=4):
    """Yield invented ratings, 610 users at a time, with the size and the habits of the real ones.

    A rating is 3.5 + how kind the user is + how good the movie is + how well the two match + noise.
    """
    random = np.random.default_rng(seed % 2**32)
    quality, kinds = random.normal(scale=0.45, size=MOVIES), random.normal(size=(MOVIES, factors))
    popularity = (np.arange(MOVIES) + 100.0) ** -1.6  # many people have seen a few movies
    for copy in range(copies):
        # Most users rate little, a few very much, and each at least 20 movies.
        share = random.lognormal(sigma=1.3, size=USERS).clip(max=40)
        counts = 20 + (share / share.sum() * (RATINGS - 20 * USERS)).astype(int)
        counts[: RATINGS - counts.sum()] += 1  # what rounding has taken away
        # Movies come to a user in a random order, popular ones sooner; the first ones are rated.
        waiting = random.standard_exponential((USERS, MOVIES), "f4") / popularity
        waiting[random.choice(USERS, MOVIES, p=counts / RATINGS), np.arange(MOVIES)] = (
            0  # each by somebody
        )
        movies = np.concatenate([row.argpartition(n)[:n] for row, n in zip(waiting, counts)])
        users = np.repeat(np.arange(USERS), counts)
        kindness = random.normal(scale=0.4, size=USERS)
        tastes = random.normal(size=(USERS, factors))
        match = (tastes[users] * kinds[movies]).sum(1) * 0.5 / factors**0.5
        noise = random.normal(scale=0.7, size=RATINGS)
        score = 3.5 + kindness[users] + quality[movies] + match + noise
        part = np.empty(RATINGS, COLUMNS)
        part["userId"], part["movieId"] = copy * USERS + users + 1, movies + 1
        part["rating"] = (2 * score).round().clip(1, 10) / 2  # half stars, 0.5 to 5
        part["timestamp"] = random.integers(828_057_600, 1_537_833_600, RATINGS)  # 1996 to 2018
        yield part


def read_csv(path):
    """Yield the ratings of a file like MovieLens' ratings.csv, at most a million at a time."""
    with path.open() as file:
        if next(file, "").strip() != ",".join(COLUMNS.names):
            raise ValueError(f"{path} does not begin with {','.join(COLUMNS.names)}")
        while lines := list(islice(file, 1_000_000)):
            yield np.loadtxt(lines, COLUMNS, delimiter=",", ndmin=1)


def write(folder, parts, args):
    """Shuffle the ratings into files, with a part or a file of them in memory at a time."""
    random, sizes = (
        np.random.default_rng(args.seed % 2**32),
        {"ratings": 0, "users": 0, "movies": 0},
    )
    # First shuffle each part and deal it out to the files, like cards.
    for part in parts:
        order = random.permutation(len(part))
        for number in range(args.files):
            with (folder / f"{number:04d}").open("ab") as file:
                file.write(part[order[number :: args.files]].tobytes())
        sizes["ratings"] += len(part)
        # One more than the largest number: tables with so many rows need no translation of it.
        sizes["users"] = max(sizes["users"], int(part["userId"].max()) + 1)
        sizes["movies"] = max(sizes["movies"], int(part["movieId"].max()) + 1)
    if not sizes["ratings"]:
        raise ValueError(f"{args.csv} holds no ratings")
    # Then shuffle within each file. Now any part of a file is a fair sample of all ratings.
    for number in range(args.files):
        dealt = folder / f"{number:04d}"
        np.save(dealt, random.permutation(np.fromfile(dealt, COLUMNS)))  # to 0000.npy and so on
        dealt.unlink()
    (folder / "sizes.json").write_text(json.dumps(sizes | {"files": args.files}))
    return sizes


def main(args):
    """Generate or read, write, report."""
    if args.folder.exists() and not args.force:
        sys.exit(f"{args.folder} is there already. To write it anew: --force")
    parts = read_csv(args.csv) if args.csv else generate(args.copies, args.seed)
    # Under another name first: nobody ever opens a folder that is half written.
    temporary = args.folder.with_name(f".{args.folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        sizes = write(temporary, parts, args)
        # Remove what an earlier run has written. If anything else is there, replace() fails.
        for old in [*args.folder.glob("[0-9]*.npy"), *args.folder.glob("sizes.json")]:
            old.unlink()
        temporary.replace(args.folder)
    except (OSError, ValueError) as error:
        sys.exit(f"{args.folder} could not be written: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    megabytes = sum(file.stat().st_size for file in args.folder.iterdir()) / 1e6
    print(f"{args.folder}: {megabytes:,.1f} MB")
    numbers = f"users 1 to {sizes['users'] - 1:,} and movies 1 to {sizes['movies'] - 1:,}"
    print(f"=> {sizes['ratings']:,} ratings in {args.files} files, of {numbers}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write (ratings in the data folder)")
    parser.add_argument("--files", type=int, default=64, help="how many (64)")
    parser.add_argument("--copies", type=int, default=10, help="times 610 invented users (10)")
    parser.add_argument("--csv", type=Path, help="real ratings: a ratings.csv of MovieLens")
    parser.add_argument("--seed", type=int, default=0, help="for the ratings and their order (0)")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int) and value <= 0 and name not in ("seed", "force"):
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    args.folder = args.folder or args.data_dir / "ratings"
    return args


if __name__ == "__main__":
    main(parse_args())
