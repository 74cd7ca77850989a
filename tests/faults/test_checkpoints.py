"""Snapshots that are cut off, damaged or hostile."""

import os

import pytest
import torch
from faults import saw
from support.run import load_lesson

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
    aside = path.rename(tmp_path / "aside")  # as when a save is killed between its two renames
    assert lesson.load(path)["epoch"] == 0
    aside.rename(path)
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
