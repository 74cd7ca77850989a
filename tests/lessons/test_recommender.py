"""Ratings in many files, and lesson 19: the same model however many ranks share them."""

import argparse

import numpy as np
import torch.distributed as dist
from support.cases import written_by
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, load_lesson, losses, output_of, proof_of, same_losses
from torch.utils.data import DataLoader

CREATE = ROOT / LESSONS["create_ratings"]["file"]
LESSON = ROOT / LESSONS["19"]["file"]


def test_a_csv_of_ones_own_becomes_files(tmp_path):
    """With ids of any size, from which rows are made and can be found again."""
    csv, folder = tmp_path / "ratings.csv", tmp_path / "shards"
    given = [(9_000_000_000 + n % 7, n % 11 - 5, (1 + n % 10) / 2, n) for n in range(1000)]
    header = "userId,movieId,rating,timestamp\n"
    csv.write_text(header + "".join(f"{u},{m},{r},{t}\n" for u, m, r, t in given))
    arguments = ("--csv", csv, "--folder", folder, "--files", 7, "--seed", 1)
    output = output_of(run_ranks(1, CREATE, *arguments, cwd=tmp_path))
    proof = "=> 1,000 ratings in 7 files, of users 1 to 7 and movies 1 to 11, read as written: ok"
    assert proof_of(output) == proof
    files = [np.load(file) for file in sorted(folder.glob("*.npy"))]
    assert {len(file) for file in files} == {142, 143}
    rows = np.concatenate(files)
    in_order = np.diff(rows["timestamp"].astype(int)) == 7  # as a file without shuffling has it
    assert in_order.mean() < 0.1
    rows = np.sort(rows, order="timestamp").tolist()
    users, movies = ((folder / f"{x}.txt").read_text().split() for x in ("userId", "movieId"))
    assert [(int(users[u - 1]), int(movies[m - 1]), r, t) for u, m, r, t in rows] == given


def test_three_ranks_have_the_losses_of_one_process(tmp_path, tmp_path_factory):
    ratings = written_by("create_ratings", tmp_path_factory) / "ratings"
    curves = []
    for ranks in (1, 3):  # 168 ratings of each of 12 files in a step
        few = ("--folder", ratings, "--batch-size", 2016 // ranks, "--lr", 0.03, "--epochs", 1)
        folder = tmp_path / str(ranks)
        folder.mkdir()
        output = output_of(run_ranks(ranks, LESSON, *few, cwd=folder))
        assert f"files: 12, for each rank: {12 // ranks}\n" in output
        curves.append(zip(*losses(folder / "runs" / LESSON.stem)))
    (seen_alone, alone), (seen, shared) = curves
    assert seen == seen_alone
    assert same_losses(shared, alone)


def test_ranks_share_the_files_and_all_have_as_many_batches(monkeypatch, tmp_path):
    """Four ranks: two of six files are left out in each epoch. Each rating has its own user."""
    lengths = [101, 90, 95, 120, 97, 99]
    kinds = [("userId", "<i4"), ("movieId", "<i4"), ("rating", "<f4"), ("timestamp", "<u4")]
    users = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    files = [tmp_path / f"{number}.npy" for number in range(len(lengths))]
    for file, own in zip(files, users):
        rows = np.zeros(len(own), kinds)
        rows["userId"] = own
        np.save(file, rows)
    counts = [length * 9 // 10 for length in lengths]
    held_out = {x for own, count in zip(users, counts) for x in own[count:].tolist()}
    lesson, orders = load_lesson("19"), []
    args = argparse.Namespace(seed=0, batch_size=4)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for epoch in range(2):
        seen = []
        for rank in range(4):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            stream = lesson.ShardStream(files, counts, args)
            stream.epoch = epoch
            batches = [users.tolist() for users, _, _ in DataLoader(stream, batch_size=None)]
            # The shortest file has 81 ratings for training, and each step takes 4 of them.
            assert [len(batch) for batch in batches] == [4] * 20
            seen += [user for batch in batches for user in batch]
        assert len(seen) == len(set(seen))
        assert not set(seen) & held_out
        orders.append(seen)
    assert orders[0] != orders[1]
