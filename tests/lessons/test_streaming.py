"""The HDF5 file, and lesson 11, which streams from it."""

import importlib
import re
import sys

import h5py
import numpy as np
import pytest
import torch
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, full, output_of, write_pictures
from torch.utils.data import DataLoader, TensorDataset

CREATE = ROOT / LESSONS["create_mnist_h5"]["file"]
PAGE = CREATE.with_suffix(".md")
LESSON = ROOT / LESSONS["11"]["file"]
# Imported by name, so that also workers that are not forks find it.
sys.path.insert(0, str(LESSON.parent))
lesson = importlib.import_module(LESSON.stem)


def pack(folder):
    """Run the script of the page in a folder. Return (status, output)."""
    code = re.search(r"```python\n(import.*?)```", PAGE.read_text(), re.S)[1]
    (folder / "pack.py").write_text(code)
    return run_ranks(1, folder / "pack.py", cwd=folder)


COLOURS = {f"class{number}": (number, 0, 0) for number in range(3)}


def test_pictures_of_ones_own_can_be_streamed(tmp_path):
    write_pictures(tmp_path / "pictures", {"train": 90, "val": 90}, COLOURS)
    assert pack(tmp_path) == (0, "")
    with h5py.File(tmp_path / "pictures.h5") as file:
        assert file["images"].shape == file["test_images"].shape == (270, 3, 64, 64)
        labels = torch.from_numpy(file["labels"][:])
        assert labels.bincount().tolist() == [90, 90, 90]
        assert labels[:30].unique().numel() == 3  # shuffled
    stream = lesson.ChunkStream(tmp_path / "pictures.h5", 60, 0, 1, 0, 8)
    images, labels = next(iter(stream))
    assert torch.equal(images[:, 0, 5, 5], labels.to(torch.uint8))


def test_arrays_of_ones_own_become_a_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("images.npy", np.arange(600, dtype=np.float32)[:, None] + np.zeros(5, dtype=np.float32))
    np.save("labels.npy", np.arange(600))
    known = {"np": np, "torch": torch, "TensorDataset": TensorDataset}
    exec(re.search(r"```python\n(names.*?)```", PAGE.read_text(), re.S)[1], known)
    images, label = known["train_set"][77]
    assert images.tolist() == [77] * 5
    assert label == 77


def test_what_is_wrong_with_pictures_is_said_in_a_line(tmp_path):
    write_pictures(tmp_path / "pictures", {"train": 1, "val": 1}, COLOURS)
    picture = tmp_path / "pictures/train/class1/0.png"
    picture.write_bytes(picture.read_bytes()[:-30])
    output = output_of(pack(tmp_path), 1)
    assert re.fullmatch(r"pictures/train/class1/0.png is no whole picture: .*\n", output)
    assert not (tmp_path / "pictures.h5").exists()


@pytest.mark.parametrize(
    ("ranks", "workers", "count", "chunk_size", "method"),
    [
        (1, 0, 240, 10, None),
        (2, 2, 251, 16, "fork"),
        (7, 0, 101, 4, None),
        # As Python 3.14 and macOS start workers.
        full(2, 2, 250, 16, "forkserver"),
    ],
)
def test_each_image_at_most_once_and_as_many_batches_on_each_rank(
    ranks, workers, count, chunk_size, method, tmp_path
):
    """Each pixel holds the number of its image, below 256."""
    path, numbers, found = tmp_path / "small.h5", np.arange(count), ([], [])
    with h5py.File(path, "w") as file:
        images = np.broadcast_to(numbers.astype(np.uint8)[:, None, None], (count, 28, 28))
        file.create_dataset("images", data=images, chunks=(chunk_size, 28, 28))
        file["labels"] = numbers
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    for rank in range(ranks):
        stream = lesson.ChunkStream(path, 4, rank, ranks, 0, 3)
        loader = DataLoader(stream, batch_size=None, multiprocessing_context=method, **options)
        for epoch in range(2):  # the workers live on from one to the next
            stream.set_epoch(epoch)
            batches = list(loader)
            for images, labels in batches:
                assert torch.equal(images[:, 5, 5], labels.to(torch.uint8))
            found[epoch].append([labels.tolist() for _, labels in batches])
            done = len(batches) * 2 // 3  # after so many it is stopped, and begins again
            stream.set_epoch(epoch, done)
            assert [labels.tolist() for _, labels in loader] == found[epoch][rank][done:]
    orders = []
    for of_ranks in found:
        assert len({len(batches) for batches in of_ranks}) == 1
        seen = [number for batches in of_ranks for batch in batches for number in batch]
        readers = ranks * max(1, workers)
        each = count // chunk_size // readers * chunk_size // 4 * 4
        assert len(seen) == len(set(seen)) == each * readers
        orders.append(seen)
    assert orders[0] != orders[1]
