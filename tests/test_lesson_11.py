"""The HDF5 file and lesson 11, which streams from it."""

import argparse
import importlib
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import h5py
import pytest
import torch
from helpers import (
    LESSONS,
    ROOT,
    launch,
    losses,
    once,
    proves,
    run_lesson,
)
from mutants import assert_disproved, run_mutant
from ranks import run_ranks
from torch.utils.data import DataLoader

sys.path.insert(0, str(ROOT / "day2"))
lesson = importlib.import_module("11_mnist_ddp_pt_multinode_streaming")
LESSON = ROOT / LESSONS["11"]["file"]
APART = r"losses within \de(-0[1-4]|\+\d\d) of those from memory \(limit 1e-05\): WRONG$"
ONCE = r"^=> {} of 60,000 images once an epoch \(limit 640\), .*: WRONG$"


def create(folder, *arguments):
    """Run create_mnist_h5.py; return (exit status, output)."""
    return run_ranks(1, ROOT / LESSONS["create_mnist_h5"]["file"], *arguments, cwd=folder)


@pytest.fixture(scope="module")
def mnist_file(tmp_path_factory):
    def make():
        path = tmp_path_factory.mktemp("h5") / "mnist.h5"
        return *run_lesson("create_mnist_h5", "--file", path, cwd=path.parent), str(path)

    status, output, path = once(tmp_path_factory, "mnist_file", make)
    assert status == 0, output
    assert proves(output)
    return Path(path)


@pytest.fixture
def small_file(tmp_path):
    """Return a function that writes images whose pixels all hold the image's own number."""

    def write(count, chunk_size):
        path = tmp_path / "small.h5"
        images = torch.arange(count).to(torch.uint8)[:, None, None].expand(count, 28, 28)
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=images.numpy(), chunks=(chunk_size, 28, 28))
            file["labels"] = torch.arange(count).numpy()
            file["test_images"], file["test_labels"] = images.numpy(), torch.arange(count).numpy()
        return path

    return write


def stream(path, rank=0, world_size=1, **options):
    defaults = {"batch_size": 4, "max_steps": None, "seed": 0, "shuffle": True}
    defaults |= {"buffer": 3, "workers": 0}
    args = argparse.Namespace(file=path, **defaults | options)
    return lesson.ChunkStream(rank, world_size, args)


def test_the_file_holds_the_images(mnist_file):
    sys.path.insert(0, str(ROOT / "day1"))
    parts = importlib.import_module("2_mnist_training").load_mnist(ROOT / "data")
    expected = [tensor for part in parts for tensor in part.tensors]
    with h5py.File(mnist_file) as file:
        assert file["images"].chunks == (256, 28, 28)
        names = ("images", "labels", "test_images", "test_labels")
        for name, tensor in zip(names, expected, strict=True):
            assert torch.equal(torch.from_numpy(file[name][:]), tensor)
        assert file.attrs["mean"] == pytest.approx(0.1307, abs=1e-4)
        assert file.attrs["std"] == pytest.approx(0.3081, abs=1e-4)
        assert len(file.attrs["sha256"]) == 64


def test_gzip_copies_and_chunks(tmp_path, mnist_file):
    path = tmp_path / "other.h5"
    options = ("--gzip", 1, "--copies", 2, "--chunk-size", 1000)
    status, output = create(tmp_path, "--file", path, *options)
    assert status == 0, output
    with h5py.File(path) as file, h5py.File(mnist_file) as single:
        assert file["images"].shape == (120_000, 28, 28)
        assert file["images"].chunks == (1000, 28, 28)
        assert file["images"].compression == "gzip"
        assert (file["images"][60_000:60_100] == single["images"][:100]).all()
        assert (file["labels"][60_000:] == single["labels"][:]).all()


def test_a_file_that_is_there_stays_unless_forced(tmp_path):
    path = tmp_path / "mnist.h5"
    path.write_text("precious")
    status, output = create(tmp_path, "--file", path)
    assert status == 1
    assert output.strip() == f"{path} is there already. To write it again: --force"
    assert path.read_text() == "precious"
    status, output = create(tmp_path, "--file", path, "--force")
    assert status == 0, output
    assert lesson.hdf5_file(path) == path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--file", "/dev/null/mnist.h5"), "could not be written"),
        (("--dataset", "NoSuch"), "torchvision could not give the data set NoSuch"),
        (("--data-dir", "/nowhere"), "is missing or damaged"),
        (("--chunk-size", 0), "greater than 0, not 0"),
    ],
)
def test_create_refuses_with_a_sentence(arguments, sentence, tmp_path):
    status, output = create(tmp_path, "--file", tmp_path / "x.h5", *arguments)
    assert status
    assert "Traceback" not in output
    assert sentence in output.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mutation
def test_a_file_that_holds_something_else_is_named(tmp_path):
    line = ('file["images"][begin:end] = images', 'file["images"][begin:end] = 255 - images')
    few = ("--file", tmp_path / "mnist.h5")
    output = run_mutant("create_mnist_h5", [line], 1, *few, cwd=tmp_path)
    assert_disproved(output, ", read NOT as written: WRONG$")


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize(("count", "chunk_size"), [(240, 10), (251, 16), (101, 1), (97, 97)])
def test_each_image_at_most_once_and_as_many_batches_on_each_rank(
    world_size, workers, count, chunk_size, small_file
):
    path = small_file(count, chunk_size)
    streams = [stream(path, r, world_size, workers=workers) for r in range(world_size)]
    assert len({s.steps for s in streams}) == 1
    seen = torch.cat([lesson.order_of(s) for s in streams]).tolist()
    assert len(seen) == len(set(seen)) == streams[0].steps * 4 * world_size
    # What is left over would not have been a batch for every rank.
    assert 0 <= count - len(seen) < 4 * world_size
    assert max(seen) < count


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_deliver_what_the_plan_says(method, small_file):
    torch.set_num_threads(1)
    path = small_file(250, 16)
    source = stream(path, 1, 2, workers=2)
    loader = DataLoader(source, batch_size=None, num_workers=2, multiprocessing_context=method)
    orders = []
    for epoch in range(2):
        source.epoch = epoch
        batches = list(loader)
        assert len(batches) == len(loader)
        labels = torch.cat([labels for _, labels in batches])
        assert torch.equal(labels, lesson.order_of(source))
        assert torch.equal(torch.cat([images for images, _ in batches])[:, 5, 5], labels.byte())
        orders.append(labels.tolist())
    assert orders[0] != orders[1]  # the workers have seen the new epoch


def test_the_order_is_shuffled_unless_told_otherwise(small_file):
    path = small_file(240, 10)
    plain = lesson.order_of(stream(path, shuffle=False)).tolist()
    assert plain == list(range(240))
    mixed = lesson.order_of(stream(path)).tolist()
    assert sorted(mixed) == plain
    # Within a buffer, neighbours do not stay neighbours.
    assert sum(b - a == 1 for a, b in pairwise(mixed)) < 30
    assert lesson.order_of(stream(path, seed=1)).tolist() != mixed


def test_damage_inside_a_chunk_is_noticed(mnist_file, tmp_path):
    path = tmp_path / "damaged.h5"
    content = bytearray(mnist_file.read_bytes())
    content[len(content) // 20] ^= 1
    path.write_bytes(content)
    few = ("--file", path, "--epochs", 1, "--no-shuffle")
    status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
    assert status == 1
    assert "OSError: Can't synchronously read data (filter returned failure during read)" in output


@pytest.mark.parametrize("options", [(), ("--no-shuffle", "--workers", 2)])
def test_lesson_11_learns_the_same_from_the_file_as_from_memory(options, mnist_file, tmp_path):
    few = ("--epochs", 2, "--max-steps", 5, "--file", mnist_file)
    if options:
        status, output = run_ranks(2, LESSON, *few, *options, cwd=tmp_path)
    else:
        status, output = launch("--local", "2", LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert "=> 640 of 60,000 images once an epoch (limit 640), losses" in output
    assert len(re.findall(r"images/s$", output, re.M)) == 4
    assert len(losses(tmp_path / "runs" / "11_mnist_ddp_pt_multinode_streaming")) == 10


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("line", "wrong", "says"),
    [
        ("in permutation.split(self", "in permutation.sort().values.split(self", APART),
        ("        train_set.epoch = epoch  # without this", "        # without this", APART),
        ("        self.rank = rank\n", "        self.rank = 0\n", ONCE.format(0)),
        ("self.steps * (worker + 1) //", "(self.steps - 1) * (worker + 1) //", ONCE.format(512)),
    ],
)
def test_without_its_key_line_lesson_11_learns_something_else(
    line, wrong, says, mnist_file, tmp_path
):
    few = ("--epochs", 2, "--max-steps", 5, "--file", mnist_file)
    output = run_mutant("11", [(line, wrong)], 2, *few, cwd=tmp_path)
    assert_disproved(output, says)


def test_memory_does_not_grow_with_the_file(mnist_file, tmp_path):
    large = tmp_path / "large.h5"
    status, output = create(tmp_path, "--file", large, "--copies", 20)
    assert status == 0, output
    memory = []
    for path in (mnist_file, large):
        few = ("--epochs", 1, "--max-steps", 50, "--file", path)
        status, output = launch("--local", 1, LESSON, *few, cwd=tmp_path)
        assert status == 0, output
        row = r"^streamed: at most (\d+) MB in rank 0, (\d+) MB more in its workers$"
        streamed = [int(x) for x in re.search(row, output, re.M).groups()]
        whole = re.search(r"^from memory: at most ([\d,]+) MB in rank 0$", output, re.M)[1]
        memory.append((sum(streamed), int(whole.replace(",", ""))))
    large.unlink()
    (streamed, whole), (streamed_large, whole_large) = memory
    assert streamed_large == pytest.approx(streamed, rel=0.1)
    # The images of the large file: 19 times 47 MB more.
    assert whole_large - whole == pytest.approx(19 * 47, rel=0.1)


def test_lesson_11_measures_the_whole_test_set(mnist_file, tmp_path):
    shutil.copy(mnist_file, tmp_path / "mnist.h5")
    with h5py.File(tmp_path / "mnist.h5", "a") as file:
        del file["test_images"], file["test_labels"]
        # One image with ten different labels: any model gets exactly one right.
        file["test_images"] = file["images"][:1].repeat(10, axis=0)
        file["test_labels"] = torch.arange(10).numpy()
    few = ("--epochs", 1, "--max-steps", 2, "--stream-only", "--file", tmp_path / "mnist.h5")
    status, output = run_ranks(3, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert "test accuracy: 10.00%\n" in output, output
