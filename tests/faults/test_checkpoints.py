"""Snapshots that are cut off, damaged or hostile, and saves that are killed."""

import itertools
import multiprocessing
import os
import time

import pytest
import torch
from faults import saw
from support.run import load_lesson, seeded_rng

BEFORE = "Nothing: lesson 12 goes on from the snapshot before."


class Hostile:
    """Unpickled, it runs a command."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


@pytest.mark.parametrize("damage", ["truncated", "one bit wrong", "code"])
def test_the_newest_whole_snapshot_is_loaded(damage, tmp_path, capsys, monkeypatch):
    lesson = load_lesson("12")
    monkeypatch.setattr(lesson.dist, "get_rank", lambda: 0)
    path, sign = tmp_path / "snapshot.pt", tmp_path / "code has run"
    assert lesson.load(path) is None
    for epoch in (0, 1):
        lesson.save({"epoch": epoch, "model": {"weight": torch.arange(1000.0)}}, path)
    assert lesson.load(path)["epoch"] == 1
    assert capsys.readouterr().out == ""
    whole = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "one bit wrong":
        whole[whole.index(torch.arange(1000.0).numpy().tobytes()) + 2000] ^= 1
        path.write_bytes(whole)
    else:
        torch.save({"epoch": 2, "more": Hostile(sign)}, path)
    assert lesson.load(path)["epoch"] == 0
    said = capsys.readouterr().out
    saw(f"a snapshot: {damage}", r"^\S+ cannot be used: [^.\n]+", BEFORE, said)
    assert not sign.exists()


@pytest.mark.full
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_snapshot(tmp_path):
    lesson, choose = load_lesson("12"), seeded_rng()
    path = tmp_path / "snapshot.pt"

    def save(epochs):  # tensors so small that they need no threads: those do not survive a fork
        for epoch in epochs:
            model = [torch.full((20_000,), float(epoch)) for _ in range(25)]
            lesson.save({"epoch": epoch, "model": model}, path)

    save([0])
    newest = halves = 0
    half, before = path.with_suffix(".tmp"), path.with_suffix(".before")
    fork = multiprocessing.get_context("fork")  # this process has torch already
    for _ in range(20):
        saver = fork.Process(target=save, args=[itertools.count(newest + 1)])
        saver.start()
        time.sleep(0.05 + choose.random() / 10)
        saver.kill()
        saver.join()
        halves += half.exists()
        state = lesson.load(path)
        assert state["epoch"] >= newest
        assert all((tensor == state["epoch"]).all() for tensor in state["model"])
        newest = state["epoch"]
    assert newest > 0  # some were whole before the kill
    assert halves > 0  # at least once it was killed while it wrote
    assert set(tmp_path.iterdir()) <= {path, before, half}
    saw("lesson 12 is killed in the middle of a save, 20 times", None, BEFORE, "")
