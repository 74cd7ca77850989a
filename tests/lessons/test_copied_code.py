"""What people copy into programs of their own: as one process, or it stops and says why."""

import json
import re
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from catalog import load
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, output_of
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

FILES = {x: ROOT / LESSONS[x]["file"] for x in ("4", "15")}  # lesson 5 has lesson 4's function
TENSOR = ROOT / LESSONS["16"]["file"]
FILES |= {x: next(ROOT.glob(f"day?/exercises/solutions/{x}_*.py")) for x in ("4.5", "15.3")}
PAGE = FILES["15"].with_suffix(".md").read_text()
PARTS = ("15", "15.3")
REFUSED = {"unused": FILES, "frozen on one rank": FILES, "two dtypes": PARTS}
REFUSED |= {"unfrozen": PARTS, "clipped": ["15.3"]}
SAYS = "freeze what|NoneType|two dtypes|froze|unfrozen|changed after backward"
SITUATIONS = ["frozen", "tied", "twice", "bf16", "channels last", *REFUSED]
SHARDS = pytest.mark.skipif(torch.__version__ < (2, 8), reason="this torch cannot shard on CPUs")
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


class Model(nn.Module):
    """Three layers, and something that real models have."""

    def __init__(self, situation):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        if situation == "tied":
            self.layers[1].weight = self.layers[0].weight
        if situation == "channels last":  # rows and columns the other way round in memory
            self.layers[0].weight.data = self.layers[0].weight.data.T.contiguous().T
        self.layers[0].weight.requires_grad = situation not in ("frozen", "unfrozen")
        if situation == "frozen on one rank":
            self.layers[dist.get_rank() if dist.is_initialized() else 0].requires_grad_(False)
        self.layers[: {"bf16": 3, "two dtypes": 1}.get(situation, 0)].bfloat16()
        self.used = self.layers[::2] if situation == "unused" else self.layers

    def forward(self, x):
        for layer in self.used:
            x = layer(x.tanh().to(layer.weight.dtype))
        return x.float()


def train(way, situation, rank, ranks):
    """Train as one of the ranks with the code of a file, or without. Return what it computes."""
    model, code = Model(situation), way and load(FILES[way])
    parameters = model.parameters()
    if way == "15":
        parameters = [code.ByHand(piece).part for piece in (model.layers[2], model)]
    if way == "15.3":
        optimizer = code.ZeroOne(model, torch.optim.SGD, **SGD)
    else:
        optimizer = torch.optim.SGD(parameters, **SGD)
    batches = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))
    for step, batch in enumerate(batches):
        if situation == "unfrozen" and step == 2:
            model.requires_grad_(True)
        parts = batch.chunk(ranks)[rank].chunk(2 if situation == "twice" else 1)
        for part in parts:
            (model(part).square().mean() / len(parts)).backward()
        if way in ("4", "4.5"):
            code.average_gradients(model)
        if situation == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        (model if way == "15.3" else optimizer).zero_grad()
    with torch.no_grad():
        return model(batches[0])


def test_it_trains_as_one_process_does_or_stops_and_says_why(tmp_path):
    output = output_of(run_ranks(2, __file__, *SITUATIONS, cwd=tmp_path))
    found = re.findall(r"^(\S+), (.*?): (.*)$", output, re.M)
    assert len(found) == len(FILES) * len(SITUATIONS), output
    for way, situation, result in found:
        if way in REFUSED.get(situation, ()):
            assert re.search(SAYS, result), output
        elif (way, situation) != ("15", "clipped"):  # page 15 says that it is wrong
            assert float(result) <= (2e-2 if situation == "bf16" else 1e-6), output


@SHARDS
@pytest.mark.full
def test_compiled_and_computed_twice_the_losses_are_the_same(tmp_path):
    output = output_of(run_ranks(2, __file__, "prepare", cwd=tmp_path))
    *losses, kept = json.loads(output.splitlines()[-1])
    assert losses == [pytest.approx(losses[0], abs=1e-6)] * 3
    assert kept == sorted(kept, reverse=True)
    if torch.__version__ >= (2, 15):
        words = "keeps {:.2f} MB, with `prepare` {:.2f}, and with `prepare(layer, kept=[])` {:.2f}."
        assert words.format(*kept) in PAGE


def prepared():
    """Return the losses of a sharded model, plain and with the page's prepare, and MB kept."""
    code, page = load(FILES["15"]), {"torch": torch}
    sys.modules[code.__name__] = code  # torch 2.8 looks for it there when it compiles
    exec(re.search(r"^```python\n(from .*?)^```", PAGE, re.M | re.S)[1], page)
    kept_by = load(next(ROOT.glob("day2/exercises/15.2_*.py"))).kept
    train_set = code.make_text()
    losses, kept = [], []
    for options in (None, {}, {"kept": []}):

        def divide(piece, sharded=True, options=options):
            if options is not None and isinstance(piece, code.Layer):
                page["prepare"](piece, **options, backend="aot_eager_decomp_partition")
            if sharded:
                code.by_pytorch(piece)

        model, _ = code.build(divide, code.Meter(), "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [train_set[i + dist.get_rank() : i + 16 : 2] for i in (0, 16)]
        losses.append(code.train_steps(model, batches, optimizer, "cpu").tolist())
        model = code.Net()
        for layer in model.layers:
            divide(layer, sharded=False)
        kept.append(4 * kept_by(model, train_set[:4][0]) / 1e6)
    return [*losses, kept]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SHARDS)], ids=["library", "box"])
def test_what_page_16_has_from_pytorch_has_the_losses_of_one_process(ranks, tmp_path):
    output = output_of(run_ranks(ranks, __file__, "divided", cwd=tmp_path))
    right, losses, messages = json.loads(output.splitlines()[-1])
    assert losses == pytest.approx(right, abs=1e-5)
    if ranks == 2:
        words = "counts {all_gather_into_tensor} all-gathers, {reduce_scatter_tensor} "
        words += "reduce-scatters and {all_reduce} `all_reduce`."
        assert len(messages) == 3
        assert words.format(**messages) in TENSOR.with_suffix(".md").read_text()


def divided():
    """Return the losses of one process, and of page 16's lines; and the messages of a step.

    The lines of two ranks: sequence parallel. Of four: fully_shard over groups of two.
    """
    code, page = load(TENSOR), TENSOR.with_suffix(".md").read_text()
    block = r"^```python\n(from torch.distributed.tensor import Shard.*?)^(with .*?)^```"
    divide, step = re.search(block, page, re.M | re.S).groups()
    if dist.get_world_size() == 4:
        box = r"^(same = .*?)^for layer.*?^## In your own script\n.*?^```python\n(.*?)^```"
        divide = "".join(re.search(box, page, re.M | re.S).groups())

    def forward(model, text):  # ends as the page says
        x = model.tokens(text) + model.positions.weight
        return model.logits(nn.Sequential(*model.layers)(x)).flatten(0, 1)

    code.Net.forward = forward
    ranks = torch.arange(dist.get_world_size()).view(1, -1)
    mesh = code.make_mesh(ranks, ("data", "tensor"), "cpu", code.TIMEOUT)
    train_set = code.make_text()
    losses = [], []
    for way, found in zip(("", divide), losses):
        torch.manual_seed(0)
        names = {"mesh": mesh, "model": code.Net(), "device": torch.device("cpu")}
        names = vars(code) | names | {"train_set": train_set}
        exec(way, names)
        own = torch.optim.AdamW(names["model"].parameters(), lr=0.003, foreach=False)
        optimizer = names.get("optimizer", own)
        sampler = names.get("sampler") or code.DistributedSampler(train_set, 1, 0)
        loader = code.DataLoader(train_set, 32 // sampler.num_replicas, sampler=sampler)
        for names["text"], names["targets"] in code.islice(loader, 20):
            optimizer.zero_grad()
            with CommDebugMode() as messages:
                exec(step, names)
                optimizer.step()
            loss = code.local(names["loss"].detach())
            dist.all_reduce(loss)
            found.append(loss.item() / dist.get_world_size())
    return [*losses, {x.__name__: n for x, n in messages.get_comm_counts().items()}]


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    if sys.argv[1:] in (["prepare"], ["divided"]):
        found = prepared() if sys.argv[1] == "prepare" else divided()
        if rank == 0:
            print(json.dumps(found))
        sys.argv.pop()
    for situation in sys.argv[1:]:
        alone = train(None, situation, 0, 1)
        for way in FILES:
            try:
                result = (train(way, situation, rank, 2) - alone).abs().max().item()
            except (AssertionError, TypeError) as error:
                result = " ".join(str(error).split())
            if rank == 0:
                print(f"{way}, {situation}: {result}")
    dist.barrier()  # and no destroy_process_group, which can hang before torch 2.8
