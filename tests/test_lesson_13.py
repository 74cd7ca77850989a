"""Lesson 13: the same training however the batch is made up, and every test image counted once."""

import os
import re
import shutil
import types

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ALONE,
    LAUNCHER,
    LESSONS,
    ROOT,
    launch,
    load,
    losses,
    once,
    proof_of,
    proves,
    recorded_output,
    shape,
)
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

LESSON = ROOT / LESSONS["13"]["file"]
RUNS = f"runs/{LESSON.stem}"
TEST = 31  # pictures: 2 and 3 do not divide it. 90 for training: steps of 48 leave a smaller one.


@pytest.fixture(scope="module")
def lesson():
    return load(LESSON)


@pytest.fixture(scope="module")
def mnist(lesson):
    return lesson.load_mnist(ROOT / "data")


@pytest.fixture(scope="module")
def folder(mnist, tmp_path_factory):
    """A small part of MNIST as pictures in folders, larger than Net wants them, and in colour."""
    from PIL import Image

    path = tmp_path_factory.mktemp("pictures")
    for part, images, labels, count in (("train", *mnist[:2], 9), ("test", *mnist[2:], 3)):
        for number in range(10):
            (path / part / str(number)).mkdir(parents=True)
            extra = part == "test" and number == 0
            for i in (labels == number).nonzero()[: count + extra, 0].tolist():
                picture = Image.fromarray(images[i].numpy()).convert("RGB").resize((56, 56))
                picture.save(path / part / str(number) / f"{i}.png")
    return path


def on_pictures(folder, *options):
    return ("--image-folder", folder, "--epochs", 2, "--lr", 0.1, *options)


def curve(folder):
    return [loss for _, loss in losses(folder / RUNS)]


def accuracies(output):
    return re.findall(r"([\d.]+)% of the test images right", output)


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    """One process, 4 batches of 12 a step: its output and its losses."""

    def run():
        path = tmp_path_factory.mktemp("one")
        options = on_pictures(folder, "--batch-size", 12, "--accumulate", 4)
        status, output = run_ranks(1, LESSON, *options, cwd=path)
        return status, output, curve(path)

    status, output, expected = once(tmp_path_factory, "lesson_13_one", run)
    assert status == 0, output
    return output, expected


def test_one_process(one):
    output, expected = one
    assert "training on 1 processes, 1 nodes\n" in output
    assert "global batch 12 x 4 x 1 = 48 images\n" in output
    assert proves("13", output), output
    assert f"; {TEST} of {TEST} tested, " in output
    assert len(expected) == 4
    assert expected[-1] < expected[0]


def test_three_processes_learn_what_one_does(one, folder, tmp_path):
    """And workers read the pictures for them."""
    options = on_pictures(folder, "--batch-size", 8, "--accumulate", 2, "--workers", 1)
    status, output = launch("--local", "3", 13, *options, cwd=tmp_path)
    assert status == 0, output
    assert "training on 3 processes, 3 nodes\n" in output
    assert proves("13", output), output
    assert f"; {TEST} of {TEST} tested, " in output
    assert curve(tmp_path) == pytest.approx(one[1], abs=1e-5)
    assert accuracies(output) == accuracies(one[0])


def test_two_nodes_of_a_real_slurm_learn_what_one_process_does(one, folder, slurm, tmp_path):
    options = on_pictures(folder, "--batch-size", 24, "--accumulate", 1)
    done = slurm.run("salloc", "--nodes", 2, LAUNCHER, 13, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "training on 2 processes, 2 nodes\n" in done.stdout
    assert proves("13", done.stdout), done.stdout
    assert curve(tmp_path) == pytest.approx(one[1], abs=1e-5)
    assert accuracies(done.stdout) == accuracies(one[0])


def test_mnist_with_a_checkpoint_an_epoch(lesson, mnist, tmp_path):
    few = ("--max-steps", 30)
    status, output = run_ranks(2, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert "training on 2 processes, 1 nodes\n" in output
    assert proves("13", output), output
    assert "; 10,000 of 10,000 tested, " in output
    # What the launcher says is recorded too.
    mine, recorded = (text.partition("ranks: ")[2] for text in (output, recorded_output("13")))
    assert shape(mine) == shape(recorded)
    assert len(curve(tmp_path)) == 60
    left = {x.name for x in (tmp_path / RUNS).iterdir() if "tfevents" not in x.name}
    assert left == {"checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt"}
    for epoch, accuracy in enumerate(accuracies(output)):
        state = torch.load(tmp_path / RUNS / f"checkpoint_epoch_{epoch}.pt", weights_only=True)
        assert state["epoch"] == epoch
        net, optimizer, scheduler, scaler = lesson.prepare(60, torch.device("cpu"), arguments())
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        assert scheduler.last_epoch == 30 * (epoch + 1)
        with torch.no_grad():
            right = (net(mnist[2]).argmax(1) == mnist[3]).float().mean().item()
        assert float(accuracy) / 100 == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fewer_bits_change_the_losses_a_little(precision, folder, tmp_path):
    options = on_pictures(folder, "--batch-size", 48, "--precision", precision)
    status, output = run_ranks(1, LESSON, *options, cwd=tmp_path)
    assert status == 0, output
    assert proof_of(output).startswith(f"=> {precision}: losses within ")
    assert proves("13", output), output
    assert "within 0e+00 of one process" not in output
    assert "Warning" not in output


def test_a_compiled_model_learns_the_same(folder, one, tmp_path):
    """Wrapped and traced as ever, but not translated into C++: that takes a minute."""
    text, call = LESSON.read_text(), "torch.compile(net)"
    assert text.count(call) == 1
    file = tmp_path / LESSON.name
    file.write_text(text.replace(call, 'torch.compile(net, backend="eager")'))
    options = on_pictures(folder, "--batch-size", 12, "--accumulate", 4, "--compile")
    status, output = run_ranks(1, file, *options, cwd=tmp_path, env={"CXX": "true"})
    assert status == 0, output
    assert proves("13", output), output
    assert curve(tmp_path) == pytest.approx(one[1], abs=1e-5)


def arguments(**others):
    options = {"epochs": 2, "lr": 0.04, "seed": 0, "warm_up": 10, "precision": "fp32"}
    return types.SimpleNamespace(**options | {"accumulate": 1} | others)


def test_the_rate_rises_and_then_falls_to_zero(lesson):
    _, optimizer, scheduler, _ = lesson.prepare(100, torch.device("cpu"), arguments())
    rates = []
    for _ in range(100):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[0] == pytest.approx(0.004)
    assert 0.95 * 0.04 < max(rates) < 0.04
    assert rates[-1] < 0.001 * 0.04


def test_a_step_that_the_scaler_leaves_out_counts_nowhere(lesson, mnist):
    net, optimizer, scheduler, _ = lesson.prepare(20, torch.device("cpu"), arguments())
    first = [x.clone() for x in net.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-60)
    batches = iter([(mnist[0][:8], mnist[1][:8])] * 3)
    options = arguments(precision="fp16")
    history = lesson.train_one_epoch(net, optimizer, scheduler, scaler, batches, options)
    assert history.shape == (2, 3)
    assert scheduler.last_epoch == 1  # scales 2**120 and 2**60 are too much, 1 is not
    assert any(not torch.equal(x, y) for x, y in zip(first, net.parameters(), strict=True))


def messages(text, mnist, tmp_path):
    """Return how often the ranks average in two steps, of 3 and of 2 batches."""
    module = load(LESSON, text)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net, *tools = module.prepare(2, torch.device("cpu"), arguments())
        model, sent = DistributedDataParallel(net), []

        def hook(_, bucket):
            sent.append(bucket.index())
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)
        images, labels = (x[:40].split(8) for x in mnist[:2])
        options = arguments(accumulate=3)
        module.train_one_epoch(model, *tools, iter(list(zip(images, labels))), options)
    finally:
        dist.destroy_process_group()
    return len(sent)


def test_the_ranks_average_once_a_step(mnist, tmp_path):
    assert messages(LESSON.read_text(), mnist, tmp_path) == 2


@pytest.mark.mutation
def test_without_no_sync_they_average_in_each_batch(mnist, tmp_path):
    text, words = LESSON.read_text(), "model.no_sync() if i + 1 < len(group) else nullcontext()"
    assert text.count(words) == 1
    assert messages(text.replace(words, "nullcontext()"), mnist, tmp_path) == 5


@pytest.mark.mutation
def test_no_sync_around_backward_only_does_nothing(mnist, tmp_path):
    text = LESSON.read_text()
    begin = text.index("            with model.no_sync()")
    end = text.index("            loss_sum += loss.detach()")
    sync, *forward, backward = re.sub(r"^ *#.*\n", "", text[begin:end], flags=re.M).splitlines()
    wrong = [*(line[4:] for line in forward), sync, backward]
    wrong = text[:begin] + "\n".join(wrong) + "\n" + text[end:]
    assert messages(wrong, mnist, tmp_path) == 5


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("line", "wrong", "proof"),
    [
        ("(loss / count)", "(loss / len(labels))", "losses within .e-0[1-4] "),
        (
            "range(rank, len(data[1]), world_size)",
            "DistributedSampler(data[1], shuffle=False)",
            f"; 32 of {TEST} tested",
        ),
    ],
)
def test_without_its_key_line_lesson_13_proves_nothing(line, wrong, proof, folder, tmp_path):
    text = LESSON.read_text()
    assert text.count(line) == 1
    mutant = tmp_path / LESSON.name
    mutant.write_text(text.replace(line, wrong))
    options = on_pictures(folder, "--batch-size", 12, "--epochs", 1)
    status, output = run_ranks(2, mutant, *options, cwd=tmp_path)
    assert status == 0, output
    assert re.search(proof, proof_of(output)), output
    assert not proves("13", output)


def test_precision_fits_the_device(lesson, monkeypatch):
    native = True
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    chosen = {kind: lesson.choose_precision(torch.device(kind)) for kind in ("cpu", "cuda", "xpu")}
    assert chosen == {"cpu": "fp32", "cuda": "bf16", "xpu": "bf16"}
    native = False
    assert lesson.choose_precision(torch.device("cuda")) == "fp16"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--accumulate", 0), "accumulate must be greater than 0, not 0"),
        (("--workers", -1), "workers must not be negative"),
        (("--precision", "fp8"), "invalid choice: 'fp8'"),
        (("--compile",), "compile needs a C++ compiler"),
    ],
)
def test_bad_arguments_get_one_sentence(options, sentence, lesson, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(LESSON), *map(str, options)])
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as ended:
        lesson.parse_args()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_folders_that_do_not_fit_get_one_sentence(lesson, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.rmtree(other / "test" / "3")
    with pytest.raises(SystemExit, match="must have the same classes, at most 10"):
        lesson.load_folder(other)


def test_a_missing_folder_gets_one_sentence(tmp_path):
    status, output = run_ranks(1, LESSON, "--image-folder", "nowhere", cwd=tmp_path)
    assert status == 1
    assert len(output.splitlines()) == 1
    assert "No such file or directory: 'nowhere/train'" in output
    assert os.listdir(tmp_path) == []
