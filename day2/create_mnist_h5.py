"""Write MNIST into one HDF5 file, in chunks, for lesson 11 to stream from.

Builds on: 2_mnist_training.py
New here:  HDF5, dataset, chunk
Run:       python day2/create_mnist_h5.py [--copies 20]
Look for:  => mnist.h5: ... images of 28 x 28 in chunks of 256, ..., read as written: ok
Try next:  --gzip 4: how much smaller is the file, and how much slower is lesson 11?
"""

import argparse
import hashlib
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST


def write_images(file, train_set, test_set, args):
    """Write all images and labels into an HDF5 file that is open for writing.

    It then holds four datasets, as HDF5 calls its arrays: images, uint8 [N, 28, 28],
    and labels, int64 [N]; test_images and test_labels.
    """
    images, labels = [tensor.numpy() for tensor in train_set.tensors]
    count = args.copies * len(images)
    # HDF5 reads, checks and unpacks whole chunks only, even if it wants a single image.
    # Each chunk has a checksum (fletcher32), so damage is noticed when it is read.
    options = {"chunks": (args.chunk_size, 28, 28), "fletcher32": True}
    if args.gzip:
        options |= {"compression": "gzip", "compression_opts": args.gzip}
    file.create_dataset("images", (count, 28, 28), "uint8", **options)
    file.create_dataset("labels", (count,), "int64")
    for begin in range(0, count, len(images)):
        end = begin + len(images)
        file["images"][begin:end] = images  # goes to the disk: memory holds one copy
        file["labels"][begin:end] = labels
    test_images, test_labels = [tensor.numpy() for tensor in test_set.tensors]
    file["test_images"] = test_images
    file["test_labels"] = test_labels
    # Attributes are small values that describe the data: here of pixels from 0 to 1.
    file.attrs["mean"] = images.mean() / 255
    file.attrs["std"] = images.std() / 255


def main(args):
    """Load, write, read again, report."""
    if args.file.exists() and not args.force:
        sys.exit(f"{args.file} already exists. To write it again: --force")
    if args.file.exists() and not args.file.is_file():
        sys.exit(f"{args.file} is no ordinary file, so it stays")
    train_set, test_set = load_dataset(args.dataset)
    with safe_file(args.file) as file:
        write_images(file, train_set, test_set, args)
        checksum, same = read_again(file, train_set)
        file.attrs["sha256"] = checksum
        count = len(file["images"])
    print(f"{args.file}: {args.file.stat().st_size / 1e6:,.1f} MB")
    size = f"{count:,} images of 28 x 28 in chunks of {args.chunk_size}"
    read = "as" if same else "NOT as"
    claim = f"{args.file.name}: {size}, sha256 {checksum[:12]}, read {read} written"
    return prove(claim, same)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def read_again(file, train_set):
    """Return the SHA-256 of what the file holds, and whether it is what was written."""
    images, labels = [tensor.numpy() for tensor in train_set.tensors]
    written = hashlib.sha256()
    held = hashlib.sha256()
    for begin in range(0, len(file["images"]), len(images)):
        end = begin + len(images)
        written.update(images)
        written.update(labels)
        held.update(file["images"][begin:end])
        held.update(file["labels"][begin:end])
    return held.hexdigest(), held.digest() == written.digest()


@contextmanager
def safe_file(path):
    """Open a new HDF5 file, which has a temporary name until it is complete.

    So nobody ever opens a half-written file, and an older file stays until then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def stop(number, frame):
        """Exit immediately: h5py sometimes loses an exception, so raise none."""
        temporary.unlink(missing_ok=True)
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and kill
        # A script starts a command before & so that it ignores Ctrl-C: leave it so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        path.parent.mkdir(exist_ok=True)
        # With mode x a second writer of this file fails. Mode w would empty the file
        # that the first one has open.
        with h5py.File(temporary, "x") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        reason = os.strerror(error.errno) if error.errno else error
        print(f"{path} could not be written: {reason}", file=sys.stderr, flush=True)
        os._exit(1)  # HDF5 crashes when it closes a file for which there was no room
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_dataset(name):
    """Return what load_mnist returns, for any such data set that torchvision has."""
    from torchvision import datasets

    if name == "MNIST":
        return load_mnist()
    sets = []
    try:
        for train in (True, False):
            part = getattr(datasets, name)(DATA, train=train, download=True)
            images, labels = torch.as_tensor(part.data), torch.as_tensor(part.targets)
            sets.append(TensorDataset(images, labels))
    except Exception as error:
        sys.exit(f"torchvision could not give the data set {name}: {error}")
    if images.shape[1:] != (28, 28) or images.dtype != torch.uint8:
        sys.exit(f"{name} has images of a shape other than 28 x 28, or in colour.")
    return sets


def load_mnist():
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    train_set = MNIST(DATA, train=True)
    test_set = MNIST(DATA, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--file", type=Path, help="what to write (mnist.h5 in the data folder)")
    add("--chunk-size", type=int, default=256, help="images in a chunk (256)")
    add("--gzip", type=int, choices=range(1, 10), help="compress, 1 to 9")
    add("--copies", type=int, default=1, help="write all so many times (1)")
    add("--dataset", default="MNIST", help="one of torchvision's (MNIST)")
    add("--force", action="store_true", help="replace a file that is there")
    args = parser.parse_args()
    for name, number in vars(args).items():
        if type(number) in (int, float) and not 0 < number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if args.file is None:
        args.file = DATA / f"{args.dataset.lower()}.h5"
    return args


if __name__ == "__main__":
    args = parse_args()
    sys.exit(main(args))
