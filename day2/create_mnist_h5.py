"""Write MNIST into one HDF5 file, in chunks, for lesson 11 to stream from.

Builds on: 2_mnist_training.py
New here:  HDF5, dataset, chunk
Run:       python day2/create_mnist_h5.py [--copies 20]
Look for:  => mnist.h5: 60,000 images of 28 x 28 in chunks of 256, sha256 d18cfd466eb1
Try next:  --gzip 4: how much smaller is the file, and how much slower is lesson 11?
"""

import argparse
import hashlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import h5py
import torch
from torchvision import datasets


def load_mnist(data_dir):
    """Return images, uint8 [N, 28, 28], and labels, int64 [N]: of training, then of testing."""
    from torchvision.datasets import MNIST, utils  # here, because the ranks need not wait for it

    # Unpacked for this process alone: whoever shares the files may read one half written.
    with tempfile.TemporaryDirectory() as folder:
        (raw := Path(folder, "MNIST", "raw")).mkdir(parents=True)
        for name, md5 in MNIST.resources:
            if not utils.check_integrity(archive := data_dir / "MNIST" / "raw" / name, md5):
                sys.exit(f"{archive} is missing or damaged. Restore it: git checkout data/MNIST")
            utils.extract_archive(archive, raw)
        parts = MNIST(folder, train=True), MNIST(folder, train=False)
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def load_dataset(name, data_dir):
    """Return the same four tensors for any data set of torchvision with images of 28 x 28."""
    if name == "MNIST":
        return load_mnist(data_dir)
    try:
        kind = getattr(datasets, name)
        parts = [kind(data_dir, train=train, download=True) for train in (True, False)]
        tensors = [torch.as_tensor(x) for part in parts for x in (part.data, part.targets)]
    except Exception as error:
        sys.exit(f"torchvision could not give the data set {name}: {error}")
    if tensors[0].shape[1:] != (28, 28) or tensors[0].dtype != torch.uint8:
        sys.exit(f"{name} has images of another shape than 28 x 28, or in colour.")
    return tensors


def write(path, tensors, args):
    """Write the file under another name first: nobody ever opens one that is half written."""
    images, labels, test_images, test_labels = (tensor.numpy() for tensor in tensors)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    checksum = hashlib.sha256()

    def stop(*_):  # by Ctrl-C or kill. An exception is sometimes lost inside h5py: raise none.
        temporary.unlink(missing_ok=True)
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        # Mode x: a second writer fails. Mode w would empty a file that somebody else has open.
        with h5py.File(temporary, "x") as file:
            # A chunk is what is read, checked and unpacked at once.
            options = {"chunks": (args.chunk_size, 28, 28), "fletcher32": True}
            if args.gzip:
                options |= {"compression": "gzip", "compression_opts": args.gzip}
            count = args.copies * len(labels)
            file.create_dataset("images", (count, 28, 28), "uint8", **options)
            file.create_dataset("labels", (count,), "int64")
            for copy in range(args.copies):
                part = slice(copy * len(labels), (copy + 1) * len(labels))
                file["images"][part], file["labels"][part] = images, labels
                checksum.update(images)
                checksum.update(labels)
            file["test_images"], file["test_labels"] = test_images, test_labels
            file.attrs["mean"], file.attrs["std"] = images.mean() / 255, images.std() / 255
            file.attrs["sha256"] = checksum.hexdigest()
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    return count, checksum.hexdigest()


def main(args):
    """Load, write, report."""
    if args.file.exists() and not args.force:
        sys.exit(f"{args.file} is there already. To write it anew: --force")
    tensors = load_dataset(args.dataset, args.data_dir)
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        count, checksum = write(args.file, tensors, args)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        print(f"{args.file} could not be written: {reason}", file=sys.stderr, flush=True)
        os._exit(1)  # HDF5 crashes when it closes a file for which there was no room
    print(f"{args.file}: {args.file.stat().st_size / 1e6:,.1f} MB")
    size = f"{count:,} images of 28 x 28 in chunks of {args.chunk_size}"
    print(f"=> {args.file.name}: {size}, sha256 {checksum[:12]}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="what to write (mnist.h5 in the data folder)")
    parser.add_argument("--chunk-size", type=int, default=256, help="images in a chunk (256)")
    parser.add_argument("--gzip", type=int, choices=range(1, 10), help="compress, 1 to 9")
    parser.add_argument("--copies", type=int, default=1, help="all images so many times (1)")
    parser.add_argument("--dataset", default="MNIST", help="one of torchvision's (MNIST)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    args.file = args.file or args.data_dir / f"{args.dataset.lower()}.h5"
    return args


if __name__ == "__main__":
    main(parse_args())
