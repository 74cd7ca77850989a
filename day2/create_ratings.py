"""Write movie ratings into many files, called shards, for lesson 19 to stream from.

Builds on: create_mnist_h5.py
New here:  shard, shuffling more than memory holds
Run:       python day2/create_ratings.py [--copies 200]
Look for:  => ... ratings in ... files, of users 1 to ... and ..., read as written: ok
Try next:  real ratings: https://grouplens.org/datasets/movielens/, then --csv FILE
"""

import argparse
import json
import os
import shutil
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

COLUMNS = np.dtype(
    [("userId", "<i4"), ("movieId", "<i4"), ("rating", "<f4"), ("timestamp", "<u4")]
)


def write(folder, parts, args):
    """Shuffle all ratings into files. Return how many there are, and their sums.

    parts: yields arrays of ratings. Only one part is in memory at a time, or one file.
    """
    random = np.random.default_rng(args.seed)
    sizes = {"files": args.files, "ratings": 0}
    sums = 0
    known = {"userId": {}, "movieId": {}}  # the number that each id has got
    # First shuffle each part and deal it out to the files, like cards.
    for part in renumber(parts, known):
        order = random.permutation(len(part))
        for number in range(args.files):
            with (folder / f"{number:04d}").open("ab") as file:
                file.write(part[order[number :: args.files]].tobytes())
        sizes["ratings"] += len(part)
        sums += sums_of(part)
    # Then shuffle within each file. Now any part of a file is a fair sample of all.
    for number in range(args.files):
        dealt = folder / f"{number:04d}"
        ratings = np.fromfile(dealt, COLUMNS)
        np.save(dealt, random.permutation(ratings))  # to 0000.npy and so on
        dealt.unlink()
    # Lesson 19 has a row for each number. They begin at 1, so row 0 stays unused.
    sizes["users"] = len(known["userId"]) + 1
    sizes["movies"] = len(known["movieId"]) + 1
    for name, numbers in known.items():
        ids = [f"{id}\n" for id in numbers]  # the id in line 7 has the number 7
        (folder / f"{name}.txt").write_text("".join(ids))
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return sizes, sums


def main(args):
    """Generate or read, write, read again, report."""
    if args.folder.exists() and not args.force:
        sys.exit(f"{args.folder} already exists. To write it again: --force")
    parts = read_csv(args.csv) if args.csv else generate(args.copies, args.seed)
    with safe_folder(args.folder) as folder:
        sizes, written = write(folder, parts, args)
        if sizes["ratings"] < 2 * args.files:  # lesson 19 tests with one
            few = f"{sizes['ratings']} ratings are too few for {args.files} files"
            sys.exit(f"{few}: each needs 2, so take fewer --files")
    megabytes = sum(file.stat().st_size for file in args.folder.iterdir()) / 1e6
    print(f"{args.folder}: {megabytes:,.1f} MB")
    users, movies = sizes["users"] - 1, sizes["movies"] - 1
    numbers = f"users 1 to {users:,} and movies 1 to {movies:,}"
    held = sum(sums_of(np.load(file)) for file in args.folder.glob("*.npy"))
    same = (held == written).all()
    read = f"read {'as' if same else 'NOT as'} written"
    claim = f"{sizes['ratings']:,} ratings in {args.files} files, of {numbers}, {read}"
    return prove(claim, same)


# ---- Shared helpers, identical in every lesson

RATINGS = Path(__file__).parents[1] / "data" / "ratings"
USERS, MOVIES, COUNT = 610, 9_724, 100_836  # as in MovieLens ml-latest-small
CSV = np.dtype(
    [("userId", "<i8"), ("movieId", "<i8"), ("rating", "<f4"), ("timestamp", "<u4")]
)


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def sums_of(ratings):
    """Return their number and the sum of each column, in any order the same: [5].

    The columns are added up as whole numbers, by their bits, so nothing is rounded.
    """
    columns = ratings.view("<u4").reshape(-1, len(COLUMNS))
    return np.array([len(ratings), *columns.sum(axis=0, dtype="i8")])


@contextmanager
def safe_folder(folder):
    """Make a new folder, which has a temporary name until it is complete.

    So nobody ever reads a half-written folder, and an older one stays until then.
    """
    folder = folder.resolve()  # of a link, where it leads
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    names = ["sizes.json", "userId.txt", "movieId.txt"]
    written = {*folder.glob("[0-9]*.npy"), *[folder / name for name in names]}
    try:
        if folder.exists() and set(folder.iterdir()) - written:
            raise OSError("it holds other files")
        temporary.mkdir()
        yield temporary
        for file in written:  # by an earlier run
            file.unlink(missing_ok=True)
        temporary.replace(folder)
    except OSError as error:
        sys.exit(f"{folder} could not be written: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def generate(copies, seed, factors=4):
    """Yield invented ratings, 610 users at a time, as many and as uneven as real ones.

    A rating is 3.5, and how kind the user is, and how good the movie is, and how well
    the two match, and noise.
    """
    random = np.random.default_rng(seed)
    quality = random.normal(scale=0.45, size=MOVIES)
    kinds = random.normal(size=(MOVIES, factors))
    popularity = (np.arange(MOVIES) + 100.0) ** -1.6  # many people see a few movies
    for copy in range(copies):
        # Most users rate little, a few very much, and each at least 20 movies.
        share = random.lognormal(sigma=1.3, size=USERS).clip(max=40)
        counts = 20 + (share / share.sum() * (COUNT - 20 * USERS)).astype(int)
        counts[: COUNT - counts.sum()] += 1  # what rounding has taken away
        # Movies come to a user in a random order, popular ones sooner. The user rates
        # the first ones. Each movie comes first to one user.
        waiting = random.standard_exponential((USERS, MOVIES), "f4") / popularity
        first = random.choice(USERS, MOVIES, p=counts / COUNT)
        waiting[first, np.arange(MOVIES)] = 0
        rated = []
        for row, count in zip(waiting, counts, strict=True):
            rated.append(row.argpartition(count)[:count])
        movies = np.concatenate(rated)
        users = np.repeat(np.arange(USERS), counts)
        kindness = random.normal(scale=0.4, size=USERS)
        tastes = random.normal(size=(USERS, factors))
        match = (tastes[users] * kinds[movies]).sum(1) * 0.5 / factors**0.5
        noise = random.normal(scale=0.7, size=COUNT)
        score = 3.5 + kindness[users] + quality[movies] + match + noise
        part = np.empty(COUNT, COLUMNS)
        part["userId"] = copy * USERS + users + 1
        part["movieId"] = movies + 1
        part["rating"] = (2 * score).round().clip(1, 10) / 2  # half stars, 0.5 to 5
        part["timestamp"] = random.integers(828_057_600, 1_537_833_600, COUNT)
        yield part  # the timestamps are from 1996 to 2018


def renumber(parts, known):
    """Yield the parts with the users and movies numbered 1, 2, 3, ... Fill in known.

    The ids of a CSV file may be large and far apart, but a model has a row for each
    number up to the largest.
    """
    for part in parts:
        for name, numbers in known.items():
            ids, places = np.unique(part[name], return_inverse=True)
            found = [numbers.setdefault(id, len(numbers) + 1) for id in ids.tolist()]
            part[name] = np.array(found)[places]
        yield part.astype(COLUMNS)


def read_csv(path):
    """Yield the ratings of a file like MovieLens' ratings.csv, up to a million at once.

    Exit with an error message that names the difference if the file has one.
    """
    if not path.is_file():
        sys.exit(f"There is no file {path}")
    header = ",".join(COLUMNS.names)
    try:
        # utf-8-sig is UTF-8, with or without the mark that some programs put first.
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            if next(file, "").strip() != header:
                raise ValueError(f"its first line must be {header}")
            number = 2  # of the line that is read next
            ratings = 0
            lines = list(islice(file, 1_000_000))
            while lines:
                part = parse(lines, number)
                ratings += len(part)
                yield part
                number += len(lines)
                lines = list(islice(file, 1_000_000))
            if ratings == 0:
                raise ValueError("it holds no ratings")
    except ValueError as error:
        sys.exit(f"{path} is not like MovieLens' ratings.csv: {error}")


def parse(lines, number):
    """Return the ratings of lines of a CSV file, the first of which has this number.

    Raise ValueError with the number of the first line that is none.
    """
    try:
        rows = [line for line in lines if line.strip()]  # without empty lines
        ratings = np.empty(0, CSV)
        if rows:
            ratings = np.loadtxt(rows, CSV, delimiter=",", ndmin=1)
        if not np.isfinite(ratings["rating"]).all():
            raise ValueError("every rating must be a finite number")
        return ratings
    except ValueError as error:
        half = len(lines) // 2
        if half == 0:
            words = str(error).partition(" at row ")[0]  # of these lines, not the file
            raise ValueError(f"line {number:,}: {words}") from None
        parse(lines[:half], number)
        parse(lines[half:], number + half)
        raise  # not before one of these two has named the line


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--folder", type=Path, default=RATINGS, help="where to write (data/ratings)")
    add("--files", type=int, default=64, help="how many (64)")
    add("--copies", type=int, default=10, help="times 610 invented users (10)")
    add("--csv", type=Path, help="real ratings: a ratings.csv of MovieLens")
    add("--seed", type=int, default=0, help="for the ratings and their order (0)")
    add("--force", action="store_true", help="replace files that are there")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    return args


if __name__ == "__main__":
    sys.exit(main(parse_args()))
