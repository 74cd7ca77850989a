"""Lesson 13: the same training however the batch is made up, and every test image counted once."""

import contextlib
import re

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
    refusal,
    same_losses,
    shape,
)
from mutants import assert_disproved, run_mutant
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

LESSON = ROOT / LESSONS["13"]["file"]
RUNS = f"runs/{LESSON.stem}"
TESTED = ", 10,000 of 10,000 tested as by one process: ok"
FEW = ("--epochs", 2, "--max-steps", 6, "--warm-up", 4)


@pytest.fixture(scope="module")
def lesson():
    return load(LESSON)


@pytest.fixture(scope="module")
def mnist(lesson):
    return lesson.load_mnist(ROOT / "data")


def made_of(batch_size, accumulate, ranks):
    """Return options for steps of so many batches, with the learning rate 0.05 for the step."""
    rate = 0.05 / accumulate / ranks
    return ("--batch-size", batch_size, "--accumulate", accumulate, "--lr", rate, *FEW)


def curve(folder):
    return [loss for _, loss in losses(folder / RUNS)]


def accuracies(output):
    return [float(x) for x in re.findall(r"test accuracy: ([\d.]+)%", output)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process, 4 batches of 12 a step: its output and its losses."""

    def run():
        path = tmp_path_factory.mktemp("one")
        status, output = run_ranks(1, LESSON, *made_of(12, 4, 1), cwd=path)
        return status, output, curve(path)

    status, output, expected = once(tmp_path_factory, "lesson_13_one", run)
    assert status == 0, output
    return output, expected


def test_one_process(one):
    output, expected = one
    assert "fp32, global batch 12 x 4 x 1, highest learning rate 0.05\n" in output
    assert proves(output), output
    assert TESTED in output
    assert len(expected) == 12
    assert expected[-1] < expected[0]


def assert_learned_what_one_does(one, output, folder):
    assert proves(output), output
    assert TESTED in output
    assert same_losses(curve(folder), one[1])
    assert accuracies(output) == pytest.approx(accuracies(one[0]), abs=0.05)


def test_three_processes_learn_what_one_does(one, tmp_path):
    status, output = launch("--local", "3", 13, *made_of(8, 2, 3), cwd=tmp_path)
    assert status == 0, output
    assert_learned_what_one_does(one, output, tmp_path)


def test_two_nodes_of_a_real_slurm_learn_what_one_process_does(one, slurm, tmp_path):
    command = ("salloc", "--nodes", 2, LAUNCHER, 13, *made_of(24, 1, 2))
    done = slurm.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_learned_what_one_does(one, done.stdout, tmp_path)


def test_mnist_with_a_checkpoint_an_epoch(lesson, mnist, tmp_path):
    status, output = run_ranks(2, LESSON, "--max-steps", 30, "--check-every", 10, cwd=tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert TESTED in output
    # What the launcher says is recorded too.
    mine, recorded = (text.partition("ranks: ")[2] for text in (output, recorded_output("13")))
    assert shape(mine) == shape(recorded)
    assert len(curve(tmp_path)) == 60
    left = {x.name for x in (tmp_path / RUNS).iterdir() if "tfevents" not in x.name}
    assert left == {"checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt"}
    images, labels = mnist[1].tensors
    for epoch, accuracy in enumerate(accuracies(output)):
        state = torch.load(tmp_path / RUNS / f"checkpoint_epoch_{epoch}.pt", weights_only=True)
        assert state["epoch"] == epoch
        model = lesson.Net()
        model.load_state_dict(state["model"])
        with torch.no_grad():
            right = (model(images).argmax(dim=1) == labels).float().mean().item()
        assert accuracy / 100 == pytest.approx(right, abs=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        optimizer.load_state_dict(state["optimizer"])
        assert all("momentum_buffer" in x for x in optimizer.state.values())
        warm_up, decay = state["scheduler"]["_schedulers"]
        assert warm_up["last_epoch"] == decay["last_epoch"] == 30 * (epoch + 1)
        torch.amp.GradScaler("cpu", enabled=False).load_state_dict(state["scaler"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fewer_bits_change_the_losses_a_little(precision, tmp_path):
    few = (*made_of(24, 2, 1), "--precision", precision)
    status, output = run_ranks(1, LESSON, *few, cwd=tmp_path)
    assert status == 0, output
    assert proof_of(output).startswith(f"=> {precision}: losses within ")
    assert proves(output), output
    assert "within 0e+00 of one process" not in output
    assert "Warning" not in output


def test_the_rate_rises_and_then_falls_to_zero(tmp_path):
    few = ("--epochs", 8, "--max-steps", 3, "--warm-up", 9, "--accumulate", 1, "--lr", 0.04)
    status, output = run_ranks(1, LESSON, *few, "--batch-size", 4, cwd=tmp_path)
    assert status == 0, output
    files = [tmp_path / RUNS / f"checkpoint_epoch_{epoch}.pt" for epoch in range(8)]
    states = [torch.load(file, weights_only=True) for file in files]
    rates = [state["optimizer"]["param_groups"][0]["lr"] for state in states]
    assert rates[:3] == sorted(rates[:3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[0] < 0.5 * 0.04
    assert 0.6 * 0.04 < max(rates) < 0.04
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def train_on(module, model, batches, scaler, **options):
    """Train on the batches as the lesson does; return the scheduler and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer, start_factor=1)
    usual = {"precision": "fp32", "accumulate": 1, "clip": 1.0, "check_every": 100}
    args = type("Args", (), usual | options)
    device = torch.device("cpu")
    found = module.train_one_epoch(model, batches, optimizer, scheduler, scaler, device, args)
    return scheduler, found


def test_a_step_that_the_scaler_leaves_out_counts_nowhere(lesson, mnist):
    model = lesson.Net()
    first = [x.clone() for x in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-60)
    batches = [mnist[0][:8]] * 3
    scheduler, found = train_on(lesson, model, batches, scaler, precision="fp16")
    assert found.shape == (3,)
    assert scheduler.last_epoch == 1  # scales 2**120 and 2**60 are too much, 1 is not
    assert any(not torch.equal(x, y) for x, y in zip(first, model.parameters(), strict=True))


def test_gradients_are_clipped_as_they_are_not_scaled(lesson, mnist):
    models = [lesson.Net(), lesson.Net()]
    models[1].load_state_dict(models[0].state_dict())
    scalers = [torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")]
    before = torch.nn.utils.parameters_to_vector(models[0].parameters()).detach()
    steps = []
    for model, scaler in zip(models, scalers, strict=True):
        train_on(lesson, model, [mnist[0][:8]], scaler, clip=0.01)
        steps.append(torch.nn.utils.parameters_to_vector(model.parameters()) - before)
    assert steps[0].norm().item() == pytest.approx(0.1 * 0.01, rel=0.01)  # rate x clip
    assert torch.allclose(*steps, atol=1e-6)


def messages(text, mnist, tmp_path):
    """Return how often the ranks average in two steps of 3 batches each."""
    module = load(LESSON, text)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, sent = DistributedDataParallel(module.Net()), []

        def hook(_, bucket):
            sent.append(bucket.index())
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)
        batches = [mnist[0][i : i + 8] for i in range(0, 48, 8)]
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        _, found = train_on(module, model, batches, scaler, accumulate=3)
        assert found.shape == (2,)
    finally:
        dist.destroy_process_group()
    return len(sent)


def test_the_ranks_average_once_a_step(mnist, tmp_path):
    assert messages(LESSON.read_text(), mnist, tmp_path) == 2


@pytest.mark.mutation
def test_without_no_sync_they_average_in_each_batch(mnist, tmp_path):
    text, words = LESSON.read_text(), "nullcontext() if last else model.no_sync()"
    assert text.count(words) == 1
    assert messages(text.replace(words, "nullcontext()"), mnist, tmp_path) == 6


@pytest.mark.mutation
def test_no_sync_around_backward_only_does_nothing(mnist, tmp_path):
    text = LESSON.read_text()
    begin = text.index("        with nullcontext() if last")
    end = text.index("        samples += len(labels)\n")
    sync, *forward, backward = re.sub(r"^ *#.*\n", "", text[begin:end], flags=re.M).splitlines()
    wrong = [*(line[4:] for line in forward), sync, backward]
    wrong = text[:begin] + "\n".join(wrong) + "\n" + text[end:]
    assert messages(wrong, mnist, tmp_path) == 6


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("clip", "line", "wrong", "proof"),
    [
        (100, "(loss / args.accumulate)", "(loss)", "^=> fp32: losses within .e-0[1-4] "),
        (
            100,
            "scaler.scale(loss / args.accumulate)",
            "scaler.scale(loss)",
            "^=> bf16: losses within .e-0[1-2] ",
        ),
        (
            0.3,
            "            nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n            #",
            "            #",
            "losses within .e-0[1-4] ",
        ),
        (
            1,
            "range(rank, len(test_set), world_size)",
            "DistributedSampler(test_set, shuffle=False)",
            ", 10,002 of 10,000 tested",
        ),
        (
            1,
            '        "model": model.state_dict(),',
            '        "model": Net().state_dict(),',
            "tested DIFFERENTLY than by one process: WRONG$",
        ),
    ],
)
def test_without_its_key_line_lesson_13_proves_nothing(clip, line, wrong, proof, tmp_path):
    few = ("--epochs", 1, "--max-steps", 20, "--batch-size", 8, "--clip", clip)
    if "bf16" in proof:
        few = (*few, "--precision", "bf16")
    output = run_mutant("13", [(line, wrong)], 3, *few, cwd=tmp_path)
    assert_disproved(output, proof)


def test_a_fingerprint_sees_the_last_bit_and_the_order(lesson):
    numbers = torch.linspace(-1, 1, 1000)
    one_bit, swapped = numbers.clone(), numbers.clone()
    one_bit[5] = torch.nextafter(one_bit[5], torch.tensor(1.0))
    swapped[[3, 700]] = swapped[[700, 3]]
    kinds = [numbers, one_bit, swapped, numbers.bfloat16(), numbers.view(20, 50).t()]
    prints = [lesson.fingerprint(x) for x in kinds]
    assert len(set(prints)) == len(kinds)
    assert lesson.fingerprint(numbers.clone()) == prints[0]
    assert lesson.fingerprint(torch.tensor(3)) == lesson.fingerprint(torch.tensor([3.0]))


def test_batches_of_few_ones_have_fingerprints_of_their_own(lesson):
    choose = torch.Generator().manual_seed(0)
    batches = [(torch.rand(3200, generator=choose) < 0.01).byte() for _ in range(2000)]
    assert len({lesson.fingerprint(batch) for batch in batches}) == 2000
    assert lesson.fingerprint(torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([{}, {}], None),
        ([{"another w": 5}, {"another w": 5}], "another w on ranks [0]"),  # most are right
        ([{}, {"another w": 5}], "another w on ranks [2]"),
        ([{"another w": 5}, {"another w": 6}], "another w on ranks [1, 2]"),
        ([{"another w": 5}], "another w on ranks [1]"),
        ([{}, {"another batch number": 8, "another w": 5}], "another batch number on ranks [2]"),
        ([{"another number of samples": 31}], "another number of samples on ranks [1]"),
        ([{}, {"the same batch": 0}], "the same batch on ranks [0, 2]"),
    ],
)
def test_the_check_names_the_ranks_that_differ(others, says, lesson, monkeypatch, capsys):
    order = ["another batch number", "another number of samples", "the same batch", "another w"]

    def gather(all_ranks, numbers):
        own = dict(zip(order, numbers.tolist(), strict=True))
        for rank, values in enumerate([{}, *others]):
            row = own | {"the same batch": rank} | values
            all_ranks[rank].copy_(torch.tensor([row[what] for what in order]))

    for name, result in (("get_world_size", 1 + len(others)), ("get_rank", 0), ("barrier", None)):
        monkeypatch.setattr(dist, name, lambda result=result: result)
    monkeypatch.setattr(dist, "all_gather", gather)
    end = contextlib.nullcontext() if says is None else pytest.raises(SystemExit, match="1")
    with end:
        lesson.check_ranks(7, 28, torch.ones(4, 3), [("w", torch.ones(2))])
    assert capsys.readouterr().err == (f"After batch 7: {says}.\n" if says else "")


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
        (("--accumulate", 0), "argument --accumulate: must be a whole number greater than 0"),
        (("--precision", "fp8"), "invalid choice: 'fp8'"),
        (("--batch-size", 30_001), "a step would take 60,002 of 60,000 images. Take a smaller "),
    ],
)
def test_bad_arguments_get_one_sentence(options, sentence):
    status, output = refusal("13", *options, env=ALONE)
    assert status == 2
    assert sentence in output.splitlines()[-1]
