"""Fetch the MovieLens ratings from GroupLens, after you have agreed to their terms of use.

Writes data/ml-latest-small/ratings.csv and the README.txt that came with it. The exit status is 0
if they are there, 1 if not, 2 for a wrong argument. Then:

    python day2/create_ratings.py --force --csv data/ml-latest-small/ratings.csv

Usage: python scripts/get_movielens.py [--yes] [--url URL] [--data-dir FOLDER]
"""

import argparse
import io
import sys
import urllib.request
import zipfile
from pathlib import Path, PurePosixPath

URL = "https://files.grouplens.org/datasets/movielens/ml-latest-small.zip"
TERMS = """\
MovieLens ml-latest-small: 100,836 ratings of 9,724 movies by 610 users, about 1 MB. Its terms of
use, in short (the README.txt in the archive has them in full):
 - for research; any commercial use only with permission from the GroupLens Research Project
 - do not state or imply that the University of Minnesota or GroupLens endorses what you do
 - in publications, cite: F. M. Harper and J. A. Konstan. 2015. The MovieLens Datasets: History and
   Context. ACM Transactions on Interactive Intelligent Systems 5, 4, article 19.
   https://doi.org/10.1145/2827872
 - you may pass it on, changed or not, under these same terms only
 - no warranty of any kind"""


def agreed():
    """Ask on the terminal; return whether the answer was yes. Nobody there means no."""
    try:
        return input("Do you agree? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def fetch(url, folder):
    """Write ratings.csv and README.txt of the archive at a URL to a folder.

    Raises OSError or ValueError if the archive cannot be had or the files cannot be written,
    zipfile.BadZipFile or KeyError if it is damaged or of another kind.
    """
    with urllib.request.urlopen(url, timeout=30) as answer:
        archive = zipfile.ZipFile(io.BytesIO(answer.read()))
    names = {PurePosixPath(name).name: name for name in archive.namelist()}
    contents = {name: archive.read(names[name]) for name in ("README.txt", "ratings.csv")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def main():
    """Show the terms, ask, fetch; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--yes", action="store_true", help="I agree to the terms: do not ask")
    parser.add_argument("--url", default=URL, help="another place that has this archive")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    args = parser.parse_args()
    print(TERMS)
    if not args.yes and not agreed():
        print("Nothing was fetched. Lesson 14 has invented ratings: python day2/create_ratings.py")
        return 1
    folder = args.data_dir / "ml-latest-small"
    try:
        fetch(args.url, folder)
    except (KeyError, zipfile.BadZipFile) as error:
        print(f"{args.url} is damaged or of another kind: {error}")
        return 1
    except (OSError, ValueError) as error:
        print(f"{args.url} could not be fetched: {getattr(error, 'reason', error)}")
        return 1
    print(f"Written: {folder / 'ratings.csv'}. Next:")
    print(f"python day2/create_ratings.py --force --csv {folder / 'ratings.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
