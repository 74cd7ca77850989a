"""Exercise 13.4: pictures in folders, with any number of classes.

Lesson:  13
Kind:    fill in, 20 minutes
Task:    Have the program train on any folder of pictures: with any number of classes,
         and with test pictures in val/ or in test/. Where both parts do not have the
         same classes, load_folder must raise a ValueError. The run has only test/, with
         the same classes: the other cases are in the check.
Run:     python day2/exercises/13.4_your_own_pictures.py
Check:   python scripts/check.py 13.4
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import write_png
from torchvision.transforms import Compose, Grayscale, PILToTensor, Resize


def load_folder(folder):
    """Return training set and test set: pictures are in train/CLASS, val/CLASS."""
    to_tensor = Compose([Grayscale(), Resize((28, 28)), PILToTensor()])
    train_set = ImageFolder(folder / "train", to_tensor)
    # TODO 1: take val/ if it exists, otherwise test/.
    # TODO 2: each part numbers its classes by itself: compare train_set.classes.
    test_set = ImageFolder(folder / "test", to_tensor)
    return train_set, test_set


def make_model(train_set):
    """Return a new model: uint8 [N, 1, 28, 28] to a score for each class."""
    # TODO 3: as many scores as there are classes.
    return nn.Sequential(Scale(), nn.Flatten(), nn.Linear(28 * 28, 10))


def main():
    """Run on one rank: train on a folder of three classes, test the model."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder, "train"), ["black", "grey", "white"])
        draw(Path(folder, "test"), ["black", "grey", "white"])
        train_set, test_set = load_folder(Path(folder))
        torch.manual_seed(0)
        model = make_model(train_set)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(50):
            for images, labels in DataLoader(train_set, batch_size=9):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
        images, labels = next(iter(DataLoader(test_set, batch_size=100)))
        correct = (model(images).argmax(dim=1) == labels).sum()
    if dist.get_rank() == 0:
        scores = model(images).shape[1]
        print(f"{correct} of {len(labels)} test pictures are right")
        print(f"classes: {len(train_set.classes)}, scores for each picture: {scores}")


class Scale(nn.Module):
    """Bring grey values, 0 to 255, to numbers from -0.5 to 0.5."""

    def forward(self, images):
        return images / 255 - 0.5


def draw(folder, classes):
    """Write three pictures for each class, PNG of any size, each class in its grey."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for size in (20, 28, 40):
            grey = 255 * number // max(1, len(classes) - 1)
            picture = torch.full((3, size, size), grey, dtype=torch.uint8)
            write_png(picture, str(folder / name / f"{size}.png"))


# ---- Shared helpers, identical in every exercise


def start():
    """Be one rank: join the process group, run main, leave the group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    main()
    dist.barrier()  # leave together
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        start()
    else:  # started with python: let torchrun start the ranks
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options.append(__file__)
        torchrun(options)
