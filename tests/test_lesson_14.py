"""Lesson 14: ratings in many files, and the same model however many ranks share them."""

import argparse
import json
import os
import re
import subprocess
import sys
import zipfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from helpers import (
    ALONE,
    LAUNCHER,
    LESSONS,
    ROOT,
    load,
    losses,
    once,
    proof_of,
    proves,
    refusal,
    run_lesson,
    same_losses,
)
from mutants import assert_disproved, run_mutant, write_mutant
from ranks import run_ranks
from torch.utils.data import DataLoader

LESSON = ROOT / LESSONS["14"]["file"]
FILES, BATCH = 12, 2016  # 168 ratings of each file in a step, on 1, 2, 3 or 4 ranks


@pytest.fixture(scope="module")
def lesson():
    return load(LESSON)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """A folder with three times the ratings of 610 users."""

    def create():
        folder = tmp_path_factory.mktemp("data") / "ratings"
        options = ("--folder", folder, "--copies", 3, "--files", FILES)
        return *run_lesson("create_ratings", *options, cwd=folder.parent), str(folder)

    status, output, folder = once(tmp_path_factory, "ratings", create)
    assert status == 0, output
    assert proves(output)
    assert proof_of(output).startswith("=> 302,508 ratings in 12 files, of users 1 to 1,830 and ")
    return Path(folder)


def options(ratings, ranks=1):
    few = ("--folder", ratings, "--batch-size", BATCH // ranks, "--lr", 0.03, "--epochs", 1)
    return [str(x) for x in few]


def results(output):
    """Return what must not depend on the number of ranks: RMSE before and after, mean loss."""
    found = re.findall(r"(?:RMSE|loss) ([\d.]+)", output)
    assert len(found) == 3, output
    return [float(x) for x in found]


def same(output, expected):
    """Return whether two runs have the same results, but for the rounding of what is printed."""
    return results(output) == pytest.approx(results(expected), abs=1.1e-4)


@pytest.fixture(scope="module")
def alone(ratings, tmp_path_factory):
    """What one process prints, and the losses that it wrote."""

    def run():
        folder = tmp_path_factory.mktemp("alone")
        status, output = run_ranks(1, LESSON, *options(ratings), cwd=folder)
        assert status == 0, output
        return output, losses(folder / "runs" / LESSON.stem)

    output, curve = once(tmp_path_factory, "lesson_14_alone", run)
    assert proves(output), output
    return output, curve


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_model(ranks, ratings, alone, tmp_path):
    few = options(ratings, ranks)
    status, output = run_ranks(ranks, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert "Warning" not in output
    assert f"files: 12, for each rank: {12 // ranks}\n" in output
    assert same(output, alone[0])
    curve = losses(tmp_path / "runs" / LESSON.stem)
    assert [seen for seen, _ in curve] == [seen for seen, _ in alone[1]]
    assert same_losses([x for _, x in curve], [x for _, x in alone[1]])


@pytest.mark.parametrize(("copies", "epochs"), [(1, 7), (10, 1)])
def test_the_defaults_learn_from_few_ratings_and_from_many(copies, epochs, tmp_path):
    """As many as MovieLens ml-latest-small has, and ten times as many."""
    few = ("--folder", tmp_path / "x", "--copies", copies)
    status, output = run_lesson("create_ratings", *few, cwd=tmp_path)
    assert status == 0, output
    status, output = run_ranks(2, LESSON, "--folder", tmp_path / "x", cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    # At least 300 steps, whatever the number of ratings: 44 or 442 of 2,048 ratings in an epoch.
    assert output.count("\nepoch ") == epochs
    assert float(re.search(r", ([\d.]+)% below", output)[1]) >= 5


@pytest.mark.mutation
def test_few_ratings_are_learned_by_heart_without_weight_decay(tmp_path):
    few = ("--folder", tmp_path / "x", "--copies", 1)
    status, output = run_lesson("create_ratings", *few, cwd=tmp_path)
    assert status == 0, output
    few = ("--folder", tmp_path / "x", "--batch-size", 2048, "--weight-decay", 0.0001)
    output = run_ranks(2, LESSON, *few, cwd=tmp_path)[1]
    assert "=> " in output
    assert float(re.search(r", (-?[\d.]+)% below", output)[1]) < 3
    # What it has seen it guesses far better than what was held out.
    seen = float(re.findall(r"loss ([\d.]+)", output)[-1]) ** 0.5
    held_out = float(re.search(r"=> RMSE ([\d.]+)", output)[1])
    assert seen < held_out - 0.27


def test_two_nodes_of_slurm_give_the_same_model(slurm, ratings, alone, tmp_path):
    command = ("salloc", "--nodes", 2, LAUNCHER, "14", *options(ratings, 2))
    done = slurm.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert proves(done.stdout)
    assert same(done.stdout, alone[0])


@pytest.mark.mutation
def test_without_the_rows_of_the_others_the_model_is_another_one(ratings, alone, tmp_path):
    line = ("    dist.all_gather(joined, tensor)\n", "")
    output = run_mutant("14", [line], 2, *options(ratings, 2), cwd=tmp_path)
    assert_disproved(output, ", models DIFFERENT, ")
    assert not same(output, alone[0])


@pytest.mark.mutation
def test_lesson_14_sees_that_nothing_is_learned(ratings, tmp_path):
    line = ("        optimizer.step()\n", "")
    output = run_mutant("14", [line], 2, *options(ratings, 2), cwd=tmp_path)
    assert_disproved(output, r"^=> RMSE .*, -?0\.0% below biases alone \(limit 0\.1%\), models id")


@pytest.mark.mutation
def test_lesson_14_sees_that_too_much_is_read(ratings, tmp_path):
    line = ("steps = min(self.args.buffer, self.steps - first)", "steps = self.steps - first")
    output = run_mutant("14", [line], 2, *options(ratings, 2), "--buffer", 10, cwd=tmp_path)
    read = r" [\d,]+ of 302,508 ratings read at a time \(limit 10,080\): WRONG$"
    assert_disproved(output, read)


def write_numbers(folder, lengths):
    """Write files in which each rating has a user of its own, counted through all files."""
    folder.mkdir()
    kinds = [("userId", "<i4"), ("movieId", "<i4"), ("rating", "<f4"), ("timestamp", "<u4")]
    first = 0
    for number, length in enumerate(lengths):
        rows = np.zeros(length, kinds)
        rows["userId"], rows["movieId"] = np.arange(first, first + length), number
        np.save(folder / f"{number:04d}.npy", rows)
        first += length
    return sorted(folder.glob("*.npy"))


def steps_of(module, monkeypatch, files, lengths, world_size, epoch=0):
    """Return the users of each step on each rank: [rank][step]."""
    # 4 ratings of each file in a step.
    args = argparse.Namespace(seed=0, buffer=3, batch_size=4 * (len(files) // world_size))
    counts = np.array(lengths) * 9 // 10
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    ranks = []
    for rank in range(world_size):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        stream = module.ShardStream(files, counts, args)
        stream.epoch = epoch
        batches = [users.tolist() for users, _, _ in DataLoader(stream, batch_size=None)]
        assert len(batches) == len(stream)
        ranks.append(batches)
    return ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_share_the_files_and_all_have_as_many_batches(
    world_size, lesson, monkeypatch, tmp_path
):
    lengths = [101, 90, 95, 120, 97, 99]
    files = write_numbers(tmp_path / "x", lengths)
    held_out = np.concatenate(
        [np.arange(n * 9 // 10, n) + sum(lengths[:i]) for i, n in enumerate(lengths)]
    )
    orders = []
    for epoch in range(2):
        ranks = steps_of(lesson, monkeypatch, files, lengths, world_size, epoch)
        assert len({len(steps) for steps in ranks}) == 1
        assert len({len(batch) for steps in ranks for batch in steps}) == 1
        seen = [user for steps in ranks for batch in steps for user in batch]
        assert len(seen) == len(set(seen))
        assert not set(seen) & set(held_out)
        orders.append(seen)
    assert orders[0] != orders[1]
    assert len(ranks[0]) == 20  # the shortest file has 81 ratings, and each step takes 4 of them
    if 6 % world_size == 0:
        assert len(seen) == 6 * 4 * 20
        (single,) = steps_of(lesson, monkeypatch, files, lengths, 1, epoch)
        together = [sorted(chain(*step)) for step in zip(*ranks, strict=True)]
        assert together == [sorted(step) for step in single]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            "default_rng([seed, self.epoch])",
            "default_rng([seed, self.epoch, rank])",
        ),
        ("begins[number] + first * self.size + shuffled", "begins[number] + shuffled"),
        ("rows % self.counts[number]", "rows % (self.counts[number] + 5)"),
    ],
)
def test_without_its_key_lines_ratings_come_twice_or_are_known_beforehand(
    line, wrong, monkeypatch, tmp_path
):
    text = LESSON.read_text()
    assert text.count(line) == 1
    lengths = [100] * 6
    files = write_numbers(tmp_path / "x", lengths)
    mutant = load(LESSON, text.replace(line, wrong))
    ranks = steps_of(mutant, monkeypatch, files, lengths, 2)
    seen = [user for steps in ranks for batch in steps for user in batch]
    assert len(seen) > len(set(seen)) or any(user % 100 >= 90 for user in seen)


def test_parts_are_all_ratings_once(lesson, monkeypatch, tmp_path):
    lengths = np.array([101, 90, 60_000, 120, 97])
    files, users = write_numbers(tmp_path / "x", lengths), []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        users += [x for part in lesson.parts(files, 0 * lengths, lengths, "cpu") for x in part[0]]
    assert sorted(map(int, users)) == list(range(lengths.sum()))


def test_biases_and_rmse_are_those_of_the_formula(lesson, ratings, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor)
    files = sorted(ratings.glob("*.npy"))
    lengths = np.array([len(np.load(file)) for file in files])
    counts, sizes = lengths * 9 // 10, json.loads((ratings / "sizes.json").read_text())
    known = np.concatenate([np.load(file)[:n] for file, n in zip(files, counts, strict=True)])
    users, movies, rest = known["userId"], known["movieId"], known["rating"].astype(float)
    expected = [rest.mean()]
    rest -= expected[0]
    for ids, size in ((movies, sizes["movies"]), (users, sizes["users"])):
        bias = np.bincount(ids, rest, size) / (np.bincount(ids, minlength=size) + 5)
        rest -= bias[ids]
        expected.append(bias)
    mean, user_bias, movie_bias = lesson.find_biases(files, counts, sizes, "cpu")
    assert mean.item() == pytest.approx(expected[0], abs=1e-5)
    assert movie_bias.numpy() == pytest.approx(expected[1], abs=1e-4)
    assert user_bias.numpy() == pytest.approx(expected[2], abs=1e-4)
    # A new model guesses as the biases do.
    model = lesson.Net(mean, user_bias, movie_bias, 8)
    rmse = lesson.evaluate(model, lesson.parts(files, 0 * counts, counts, "cpu"), "cpu")
    assert rmse == pytest.approx(np.sqrt((rest**2).mean()), abs=1e-4)


def test_memory_does_not_grow_with_the_ratings(lesson, ratings, tmp_path):
    """48 MB are read; and with a map that stays, which must show."""
    for file in ratings.glob("*.npy"):
        np.save(tmp_path / file.name, np.tile(np.load(file), 10))
    text, line = LESSON.read_text(), 'np.load(file, mmap_mode="r")[rows]'
    assert text.count(line) == 1
    stays = 'MAPS.setdefault(file, np.load(file, mmap_mode="r"))[rows]'
    mutant = load(LESSON, text.replace(line, stays).replace("COLUMNS = ", "MAPS = {}\nCOLUMNS = "))
    grown = []
    for module in (lesson, mutant):
        before = resident()
        for file in tmp_path.glob("*.npy"):
            for begin in range(0, len(np.load(file, mmap_mode="r")), 50_000):
                module.read_rows(file, slice(begin, begin + 50_000))
        grown.append(resident() - before)
    assert grown[0] < 12
    assert grown[1] > 30


def resident():
    """Return how many MB of this process are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# Bad data and bad arguments.


@pytest.mark.parametrize(
    "damage", ["", "folder", "sizes", "file", "truncated", "empty", "of another kind", "no JSON"]
)
def test_a_damaged_folder_is_noticed(damage, lesson, ratings, tmp_path):
    for file in ratings.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file, sizes = tmp_path / "0003.npy", tmp_path / "sizes.json"
    if damage in ("file", "sizes"):
        (file if damage == "file" else sizes).unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "of another kind":
        np.save(file, np.zeros(100))
    elif damage == "no JSON":
        sizes.write_text("[]")
    folder = tmp_path / "nowhere" if damage == "folder" else tmp_path
    if not damage:
        assert lesson.ratings_folder(str(folder)) == folder
        return
    with pytest.raises(argparse.ArgumentTypeError, match="is missing, damaged or of another kind"):
        lesson.ratings_folder(str(folder))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--factors", "0"), "argument --factors: must be "),
        (("--buffer", "-1"), "argument --buffer: must be "),
        (
            ("--folder", "/nowhere"),
            "argument --folder: /nowhere is missing, damaged or of another kind. Make it: pyth",
        ),
        ((), "12 files are too few for 13 ranks. Make more: python day2/create_ratings.py --force"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, sentence, ratings):
    env = ALONE | {"WORLD_SIZE": "13"}
    status, output = refusal("14", "--folder", ratings, *arguments, env=env)
    assert status == 2
    assert f"error: {sentence}" in output


def test_the_smallest_data_is_enough_and_any_seed_will_do(tmp_path):
    """Two ratings a file, one of them held out."""
    csv = tmp_path / "ratings.csv"
    csv.write_text("userId,movieId,rating,timestamp\n" + "1,193609,4.5,1537799250\n1,2,3,4\n" * 4)
    few = ("--csv", csv, "--folder", tmp_path / "x", "--files", 4, "--seed", -1)
    status, output = run_lesson("create_ratings", *few, cwd=tmp_path)
    assert status == 0, output
    few = ("--folder", tmp_path / "x", "--seed", -1, "--epochs", 1)
    status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert "on 4 held-out ratings" in output


# create_ratings.py and get_movielens.py


@pytest.fixture(scope="module")
def creator():
    return load(ROOT / LESSONS["create_ratings"]["file"])


def test_invented_ratings_are_like_the_real_ones(creator):
    """610 users, 9,724 movies, 100,836 ratings: MovieLens ml-latest-small."""
    first, second = creator.generate(2, 0)
    for part, users in ((first, range(1, 611)), (second, range(611, 1221))):
        assert len(part) == 100_836
        assert set(part["userId"]) == set(users)
        assert set(part["movieId"]) == set(range(1, 9725))
        assert set(part["rating"]) == {n / 2 for n in range(1, 11)}
        assert len(np.unique(part[["userId", "movieId"]])) == len(part)
        a_user, a_movie = (np.unique(part[x], return_counts=True)[1] for x in ("userId", "movieId"))
        assert a_user.min() >= 20
        assert a_user.max() > 1500
        assert 250 < a_movie.max() < 400
        assert np.median(a_movie) == 3
        assert part["rating"].mean() == pytest.approx(3.5, abs=0.1)
        assert part["rating"].std() == pytest.approx(1.04, abs=0.1)
    assert not np.array_equal(first["rating"], second["rating"])


def test_a_csv_becomes_files_of_even_size_in_random_order(creator, tmp_path):
    csv, folder = tmp_path / "ratings.csv", tmp_path / "shards"
    lines = [f"{1 + n // 100},{1 + n % 100},{(1 + n % 10) / 2},{10**9 + n}" for n in range(1000)]
    csv.write_text("\n".join([",".join(creator.COLUMNS.names), *lines]) + "\n")
    arguments = ("--csv", csv, "--folder", folder, "--files", 7)
    status, output = run_lesson("create_ratings", *arguments, cwd=tmp_path)
    assert status == 0, output
    proof = "=> 1,000 ratings in 7 files, of users 1 to 10 and movies 1 to 100, read as written: ok"
    assert proof_of(output) == proof
    files = [np.load(file) for file in sorted(folder.glob("*.npy"))]
    assert sorted({len(file) for file in files}) == [142, 143]
    rows = np.concatenate(files)
    assert not (np.diff(rows["timestamp"].astype(int)) == 1)[:100].all()
    rows = np.sort(rows, order="timestamp")
    text = [f"{u},{m},{r},{t}" for u, m, r, t in rows.tolist()]
    assert text == lines
    # What is there stays, and what this script did not write stays even then.
    status, output = run_lesson("create_ratings", *arguments, cwd=tmp_path)
    assert status == 1
    assert output.strip() == f"{folder} is there already. To write it again: --force"
    (folder / "mine.txt").write_text("precious")
    status, output = run_lesson("create_ratings", *arguments, "--force", cwd=tmp_path)
    assert status == 1
    assert f"{folder} could not be written: " in output
    assert "Traceback" not in output
    assert (folder / "mine.txt").read_text() == "precious"
    (folder / "mine.txt").unlink()
    status, output = run_lesson("create_ratings", *arguments, "--force", cwd=tmp_path)
    assert status == 0, output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ratings.csv", "shards"]


def test_ids_of_any_size_become_rows_and_can_be_found_again(tmp_path):
    csv, folder = tmp_path / "ratings.csv", tmp_path / "shards"
    given = [(9_000_000_000, -7), (5, 193_609), (9_000_000_000, 193_609), (5, 2**62)] * 10
    lines = [f"{user},{movie},{n % 9 / 2},{n}" for n, (user, movie) in enumerate(given)]
    csv.write_text("\n".join(["userId,movieId,rating,timestamp", *lines]))
    arguments = ("--csv", csv, "--folder", folder, "--files", 3)
    status, output = run_lesson("create_ratings", *arguments, cwd=tmp_path)
    assert status == 0, output
    sizes = json.loads((folder / "sizes.json").read_text())
    assert sizes == {"files": 3, "ratings": 40, "users": 3, "movies": 4}  # row 0 is unused
    users, movies = ((folder / f"{x}.txt").read_text().split() for x in ("userId", "movieId"))
    rows = np.sort(np.concatenate([np.load(x) for x in folder.glob("*.npy")]), order="timestamp")
    found = [(int(users[user - 1]), int(movies[movie - 1])) for user, movie, *_ in rows.tolist()]
    assert found == given


def test_an_id_has_the_same_number_in_every_part(creator):
    """In parts of which each brings some new ids."""
    ids = [[3, 900], [7, 3, 900, 3], [1, 7]]
    parts = [np.array([(id, 10 * id, 1, 0) for id in part], creator.CSV) for part in ids]
    known = {"userId": {}, "movieId": {}}
    rows = [part["userId"].tolist() for part in creator.renumber(parts, known)]
    assert rows == [[1, 2], [3, 1, 2, 1], [4, 3]]
    assert known["movieId"] == {30: 1, 9000: 2, 70: 3, 10: 4}


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("random.permutation(ratings)", "random.choice(ratings, len(ratings))"),
        ("order[number :: args.files]]", "order[number + 1 :: args.files]]"),
    ],
)
def test_create_ratings_sees_that_something_else_is_written(line, wrong, tmp_path):
    few = ("--folder", tmp_path / "x", "--copies", 1, "--files", 3)
    output = run_mutant("create_ratings", [(line, wrong)], 1, *few, cwd=tmp_path)
    assert_disproved(output, ", read NOT as written: WRONG$")


@pytest.mark.mutation
def test_without_the_second_shuffle_nothing_is_known_of_the_users_held_out(creator, tmp_path):
    """The exercise of the README."""
    line = ("random.permutation(ratings)", "ratings")
    mutant = write_mutant(tmp_path, "create_ratings", line)
    wrong = load(mutant)
    for module, share in ((creator, 0.1), (wrong, 1)):
        folder = tmp_path / str(share)
        folder.mkdir()
        module.write(folder, module.generate(10, 0), argparse.Namespace(seed=0, files=3))
        parts = [np.load(x)["userId"] for x in folder.glob("*.npy")]
        last = np.concatenate([part[len(part) * 9 // 10 :] for part in parts]) > 9 * 610
        assert last.mean() == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "There is no file "),
        ("a,b\n1,2\n", "its first line must be userId,movieId,rating,timestamp"),
        ("1::1193::5::978300760\n", "its first line must be userId,movieId,rating,timestamp"),
        ("HEADER1,2,three,4\n", "could not convert string 'three'"),
        ("HEADER1,2,3\n", "requires 4 columns but 3 were found"),
        ("HEADER1,tt0114709,3,4\n", "could not convert string 'tt0114709'"),
        ("HEADER1,2,nan,4\n", "every rating must be a finite number"),
        ("HEADER1,2,3,2020-01-01\n", "could not convert string '2020-01-01'"),
        ("HEADER\n\n", "it holds no ratings"),
        (b"PK\3\4\xff\xfe", "its first line must be userId,movieId,rating,timestamp"),
    ],
)
def test_a_bad_csv_gets_one_sentence(content, sentence, tmp_path):
    csv = tmp_path / "x.csv"
    if isinstance(content, bytes):
        csv.write_bytes(content)
    elif content is not None:
        csv.write_text(content.replace("HEADER", "userId,movieId,rating,timestamp\n"))
    status, output = run_lesson(
        "create_ratings", "--csv", csv, "--folder", tmp_path / "shards", cwd=tmp_path
    )
    assert status == 1
    assert len(output.splitlines()) == 1
    assert sentence in output
    assert str(csv) in output
    assert not (tmp_path / "shards").exists()


def get(*arguments, env=None):
    """Run get_movielens.py; return (exit status, what it printed after the terms)."""
    command = [sys.executable, ROOT / "scripts" / "get_movielens.py", *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    terms, _, rest = done.stdout.partition("no warranty of any kind\n")
    assert "any commercial use only with permission" in terms
    return done.returncode, rest


def test_nothing_is_fetched_without_consent_or_network(tmp_path):
    status, output = get("--data-dir", tmp_path)
    assert status == 1
    assert "Nothing was fetched." in output
    nobody = {"https_proxy": "http://127.0.0.1:9"}
    status, output = get("--yes", "--data-dir", tmp_path, env=nobody)
    assert status == 1
    assert output.startswith("https://files.grouplens.org/datasets/movielens/ml-latest-small.zip")
    assert output.count("\n") == 1
    assert "could not be fetched: " in output
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_unpacked_and_a_damaged_one_is_not(tmp_path):
    path, data = tmp_path / "small.zip", tmp_path / "data"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-latest-small/README.txt", "terms")
        archive.writestr("ml-latest-small/ratings.csv", "userId,movieId,rating,timestamp\n")
    status, output = get("--yes", "--url", path.as_uri(), "--data-dir", data)
    assert status == 0, output
    folder = data / "ml-latest-small"
    assert (folder / "README.txt").read_text() == "terms"
    assert output.endswith(f"create_ratings.py --force --csv {folder / 'ratings.csv'}\n")
    for content in (path.read_bytes()[:-30], path.read_bytes().replace(b"terms", b"trems")):
        path.write_bytes(content)
        status, output = get("--yes", "--url", path.as_uri(), "--data-dir", tmp_path / "other")
        assert status == 1
        assert "is damaged or of another kind: " in output
        assert not (tmp_path / "other").exists()
