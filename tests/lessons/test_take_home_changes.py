"""Lesson 13's examples of a change: as the page shows them, they train the same on any ranks."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import page_diffs
from support.forked_ranks import run_ranks
from support.mutants import write_mutant
from support.run import LESSONS, ROOT, losses, output_of, proves, write_pictures
from torchvision import models

LESSON = ROOT / LESSONS["13"]["file"]
FEW = (1, "--max-steps", 10, "--global-batch-size", 6, "--workers", 0)
HOW = [(3, "--batch-size=1"), (3, "--shard"), (1, "--shard")]
QUICK = [("text", 3, "--shard")]


def write_weights(folder, rng):
    """Write pictures, and weights where torchvision looks for those it downloads."""
    write_pictures(folder, {"train": 9, "val": 1}, {"red": (200, 0, 0), "blue": (0, 0, 200)})
    file = folder / "hub" / "checkpoints" / models.ResNet18_Weights.DEFAULT.url.split("/")[-1]
    file.parent.mkdir(parents=True)
    torch.save(models.resnet18().state_dict(), file)
    return "--data", folder, "--model", "resnet18"


def write_table(folder, rng):
    np.save(folder / "table.npy", rng.normal(5, 2, size=(90, 4)))
    return "--data", folder / "table.npy"


def write_text(folder, rng):
    pages = [page.read_text() for page in sorted(ROOT.glob("day?/*.md"))]
    (folder / "text.txt").write_text("".join(pages)[:6_000])
    return "--data", folder / "text.txt", "--lr", 0.001


# Not ours: a file that is opened when the first sample is read, randomness that is not torch's, and
# layers that are not dense. (With the oldest torch they are dense and real: its gloo sends no
# complex numbers, and it cannot clip a sparse gradient.)
NUMBERS = """
class Numbers(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        self.file = getattr(self, "file", None) or open("numbers", "rb", buffering=0)
        self.file.seek(index)
        time.sleep(0.002)
        assert self.file.read(1)[0] == index, "this is another sample"
        image = torch.full((3, 28, 28), float(index)) + random.random() + np.random.rand()
        image[1, 14, 14] = MIDDLE
        return image, index % 10


class Waves(nn.Sequential):
    def forward(self, images):
        x = images.flatten(1)
        return self[0](x.to(self[0].weight.dtype)).abs() + self[1]((x[:, :4] > 0).long())


def build_data"""
NEW = torch.__version__ >= (2, 8)
DTYPE = "torch.complex64" if NEW else "torch.float32"
LAYERS = f"Waves(nn.Linear(2352, 10, dtype={DTYPE}), nn.EmbeddingBag(2, 10, sparse={NEW}))"


def test_data_and_layers_that_are_not_ours(tmp_path):
    file = write_mutant(tmp_path, "13", ("\ndef build_data", NUMBERS))
    script = file.read_text()
    for old, new in (
        ("    to_tensor = [", "    return Numbers(), Numbers()\n    to_tensor = ["),
        ('    if args.model == "resnet18"', f"    return {LAYERS}, []\n    if args.model == 1"),
        ("momentum=0.9", "momentum=0.0"),  # a checkpoint cannot hold a sparse one
    ):
        script = script.replace(old, new, 1)
    (tmp_path / "numbers").write_bytes(bytes(range(240)))
    few = ("--workers", 2, "--global-batch-size", 40, "--checkpoint-dir", "runs", "--clip", "inf")
    for epochs, middle, status, says in (
        (1, "index", 0, ": ok$"),
        (2, "index + 1", 1, "^this is another training: .* has 'train: 240 "),
        (2, "os.urandom(1)[0]", 1, "^train: one index gives two samples"),
        (2, "index // (index != 120)", 1, "test sample 120 cannot be read: ZeroDivisionError"),
    ):
        file.write_text(script.replace("MIDDLE", middle))
        output = output_of(run_ranks(2, file, epochs, *few, cwd=tmp_path), status)
        assert re.search(says, output, re.M), output
        assert ("Traceback" in output) == ("cannot be read" in says)  # it has the line
    mean = script.replace('reduction="none")', "reduction='none').mean()")
    file.write_text(mean.replace("MIDDLE", "index"))
    assert "shapes [[], [], [64]], for 64" in output_of(run_ranks(2, file, *few, cwd=tmp_path), 1)
    own = script.replace("outputs = model(", "outputs = getattr(model, 'module', model)(")
    file.write_text(own.replace("MIDDLE", "index"))  # so DDP never averages
    output = output_of(run_ranks(2, file, *few, "--checkpoint-dir", "own", cwd=tmp_path), 1)
    assert "\nranks have different gradients: compute must call model(...)" in output
    sgd = "SGD(parameters, args.lr, momentum=0.0)"
    script = script.replace(DTYPE, "torch.float32").replace(sgd, "SparseAdam(parameters)")
    file.write_text(script.replace("MIDDLE", "index"))
    assert "\nSparseAdam cannot resume" in output_of(run_ranks(2, file, *few, cwd=tmp_path), 1)


WRITE = {"pictures": write_weights, "table": write_table, "text": write_text}
CASES = [(name, *how) for name in WRITE for how in HOW]
CASES = [x if x in QUICK else pytest.param(*x, marks=pytest.mark.full) for x in CASES]


@pytest.mark.parametrize(("name", "ranks", "how"), CASES)
def test_a_change_of_the_page_trains_the_same_on_any_ranks(name, ranks, how, tmp_path):
    if how == "--shard" and torch.__version__ < (2, 8):
        pytest.skip("--shard needs torch 2.8 or newer")
    page = LESSON.with_suffix(".md").read_text()
    diffs = page_diffs.diffs_in(page.partition("\n## The change\n")[2])
    file = tmp_path / "day2" / "train.py"
    file.parent.mkdir()
    file.write_text(page_diffs.apply(diffs[list(WRITE).index(name)], LESSON.read_text()))
    options = WRITE[name](tmp_path, np.random.default_rng(0))

    def train(ranks, folder, *more):
        more = (*options, *more, "--checkpoint-dir", folder)
        env = {"TORCH_HOME": str(tmp_path)}
        output = output_of(run_ranks(ranks, file, *FEW, *more, cwd=tmp_path, env=env))
        assert proves(output)
        assert "target size" not in output  # a warning: each prediction with all targets
        return np.array(losses(tmp_path / folder, "loss"))

    one, other = train(1, "one"), train(ranks, "other", how)
    assert len(one) == (3 if name == "pictures" else 10)
    assert other == pytest.approx(one, abs=1e-5)
    if name == "pictures":  # all but the last layer is as it was downloaded
        weights = load_file(tmp_path / "other" / "model.safetensors")
        downloaded = torch.load(next(tmp_path.rglob("resnet18*.pth")))
        changed = [key for key in weights if not torch.equal(weights[key], downloaded[key])]
        assert changed == ["fc.bias", "fc.weight"]
