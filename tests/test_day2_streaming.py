"""The HDF5 file, and lesson 11, which streams from it."""

import importlib
import re
import sys
from itertools import pairwise

import h5py
import pytest
import torch
from helpers import LESSONS, ROOT
from ranks import run_ranks
from short import written_by
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST

FULL = pytest.mark.full
CREATE = ROOT / LESSONS["create_mnist_h5"]["file"]
LESSON = ROOT / LESSONS["11"]["file"]
# Imported by name, so that also workers that are not forks find it.
sys.path.insert(0, str(LESSON.parent))
lesson = importlib.import_module(LESSON.stem)


@pytest.fixture
def mnist_file(tmp_path_factory):
    return written_by("create_mnist_h5", tmp_path_factory) / "mnist.h5"


# The file


def test_the_file_holds_the_images(mnist_file):
    with h5py.File(mnist_file) as file:
        assert file["images"].chunks == (256, 28, 28)
        for train, before in ((True, ""), (False, "test_")):
            expected = MNIST(ROOT / "data", train=train)
            assert torch.equal(torch.from_numpy(file[f"{before}images"][:]), expected.data)
            assert torch.equal(torch.from_numpy(file[f"{before}labels"][:]), expected.targets)
        assert file.attrs["mean"] == pytest.approx(0.1307, abs=1e-4)
        assert file.attrs["std"] == pytest.approx(0.3081, abs=1e-4)


def test_a_file_that_is_there_stays_unless_forced_to_be_another(tmp_path):
    path = tmp_path / "mnist.h5"
    path.write_text("precious")
    status, output = run_ranks(1, CREATE, "--file", path, cwd=tmp_path)
    assert status == 1
    assert output.strip() == f"{path} is there already. To write it again: --force"
    assert path.read_text() == "precious"
    other = ("--force", "--gzip", 1, "--copies", 2, "--chunk-size", 1000)
    status, output = run_ranks(1, CREATE, "--file", path, *other, cwd=tmp_path)
    assert status == 0, output
    with h5py.File(path) as file:
        images = file["images"]
        assert images.shape == (120_000, 28, 28)
        assert images.chunks == (1000, 28, 28)
        assert images.compression == "gzip"
        assert (images[60_000:60_100] == images[:100]).all()


# The stream


def write_small(path, count, chunk_size):
    """Write images whose pixels all hold the image's own number."""
    images = torch.arange(count).to(torch.uint8)[:, None, None].expand(count, 28, 28)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images.numpy(), chunks=(chunk_size, 28, 28))
        file["labels"] = torch.arange(count).numpy()


def read_epochs(path, ranks=1, workers=0, method=None, seed=0, buffer_chunks=3, epochs=2):
    """Return for each epoch what each rank gets: the numbers of the images, batch by batch.

    The workers live on from one epoch to the next.
    """
    found = [[] for _ in range(epochs)]
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    for rank in range(ranks):
        stream = lesson.ChunkStream(path, 4, rank, ranks, seed, buffer_chunks)
        loader = DataLoader(stream, batch_size=None, multiprocessing_context=method, **options)
        for epoch in range(epochs):
            stream.set_epoch(epoch)
            batches = list(loader)
            for images, labels in batches:
                assert torch.equal(images[:, 5, 5], labels.to(torch.uint8))
            found[epoch].append([labels.tolist() for _, labels in batches])
    return found


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize(
    ("ranks", "workers", "count", "chunk_size", "method"),
    [
        (1, 0, 240, 10, None),
        (2, 2, 251, 16, "fork"),
        (3, 2, 110, 7, "fork"),
        (7, 0, 101, 4, None),
        # As Python 3.14 and macOS start workers.
        pytest.param(2, 2, 250, 16, "forkserver", marks=FULL),
    ],
)
def test_each_image_at_most_once_and_as_many_batches_on_each_rank(
    ranks, workers, count, chunk_size, method, tmp_path
):
    path = tmp_path / "small.h5"
    write_small(path, count, chunk_size)
    orders = []
    for of_ranks in read_epochs(path, ranks, workers, method):
        assert len({len(batches) for batches in of_ranks}) == 1
        seen = flat(flat(of_ranks))
        readers = ranks * max(1, workers)
        each = count // chunk_size // readers * chunk_size // 4 * 4
        assert len(seen) == len(set(seen)) == each * readers
        orders.append(seen)
    assert orders[0] != orders[1]


def test_the_order_is_shuffled(tmp_path):
    path = tmp_path / "small.h5"
    write_small(path, 240, 10)
    ((mixed,),) = read_epochs(path, epochs=1)
    ((other,),) = read_epochs(path, epochs=1, seed=1)
    mixed, other = flat(mixed), flat(other)
    assert sorted(mixed) == list(range(240))
    # Within a buffer, neighbours do not stay neighbours.
    assert sum(b - a == 1 for a, b in pairwise(mixed)) < 30
    assert other != mixed


def test_a_transform_gets_each_batch(tmp_path):
    path = tmp_path / "small.h5"
    write_small(path, 40, 10)
    stream = lesson.ChunkStream(path, 4, 0, 1, 0, 3, lambda images, labels: (images / 255, labels))
    images, labels = next(iter(stream))
    assert torch.equal(images[:, 5, 5], labels / 255)


# Training from it


@FULL
def test_memory_does_not_grow_with_the_file(mnist_file, tmp_path):
    large = tmp_path / "large.h5"
    status, output = run_ranks(1, CREATE, "--file", large, "--copies", 10, cwd=tmp_path)
    assert status == 0, output
    streamed, whole = [], []
    for path in (mnist_file, large):
        few = ("--max-steps", 50, "--epochs", 1, "--file", path)
        status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
        assert status == 0, output
        row = r"^streamed: at most (\d+) MB in rank 0, (\d+) MB more in its workers$"
        streamed.append(sum(int(x) for x in re.search(row, output, re.M).groups()))
        row = r"^with the whole file in memory: ([\d,]+) MB in rank 0$"
        whole.append(int(re.search(row, output, re.M)[1].replace(",", "")))
    large.unlink()
    assert streamed[1] == pytest.approx(streamed[0], rel=0.1)
    # The images of the large file: 9 times 47 MB more.
    assert whole[1] - whole[0] == pytest.approx(9 * 47, rel=0.2)
