"""What CHOOSE's formulas say is what PyTorch sends and holds, on real ranks and on fake ones."""

import json
import re

import pytest
from catalog import load
from formulas import Model, holds, sends
from support.forked_ranks import run_ranks
from support.run import ROOT

pytest.importorskip("torch", minversion="2.15", reason="what counts was made for torch 2.15")
COUNT = load("day2/count_step.py")
Layout = COUNT.Layout
SMALL = Model(3, 64, 8, 4, 256, 512)
# On each of four real ranks, with gloo; {} is a layout.
REAL = """
import json, sys
from contextlib import nullcontext
sys.path.insert(0, {folder!r})
import torch.distributed as dist
from count_step import Layout, Model, count
dist.init_process_group("gloo")
found, peak = count(Model(*{model}), Layout(*{layout}), {tokens}, {again}, nullcontext())
if dist.get_rank() == 0:
    print(json.dumps([found.messages, found.sent, peak]))
dist.barrier()
"""
LAYOUTS = [
    (Layout(replicas=2, shards=2), True),
    (Layout(shards=2, tensor=2), False),
    (Layout(context=2, tensor=2), True),
]


@pytest.mark.parametrize(("layout", "again"), LAYOUTS)
def test_fake_ranks_count_what_real_ones_do(layout, again, tmp_path):
    script = tmp_path / "real.py"
    known = {"model": tuple(SMALL[:6]), "layout": tuple(layout), "tokens": 32, "again": again}
    script.write_text(REAL.format(folder=str(ROOT / "day2"), **known))
    status, output = run_ranks(4, script, cwd=tmp_path)
    assert status == 0, output
    fake, most = COUNT.count_on_fake_ranks(SMALL, layout, 32, again)
    messages, sent, peak = json.loads(output.splitlines()[-1])
    assert (messages, sent) == (fake.messages, fake.sent)
    assert peak == pytest.approx(most, rel=0.02)
    for way, formula in sends(SMALL, layout, 32, again).items():
        assert fake.sent[way] == pytest.approx(formula, rel=0.02), way
    assert 0.6 < most / sum(holds(SMALL, layout, 32, again).values()) < 1.2


def test_the_table_is_of_today_s_formulas():
    page = (ROOT / "day2" / "21_llama_every_way.md").read_text()
    rows = re.findall(r"^\| (\d+B), (\S+) tokens(.*?) \| \S+: (.*?) \| (.*)$", page, re.M)
    assert len(rows) == 6
    for name, tokens, again, sizes, cells in rows:
        layout = Layout(**{way: int(size) for way, size in map(str.split, sizes.split(" x "))})
        case = Model(*COUNT.MODELS[name]), layout, int(tokens.replace(",", "")), bool(again)
        formulas = [*sends(*case).values(), sum(holds(*case).values())]
        assert re.findall(r"/ ([\d.]+)", cells) == [f"{x / 1e9:.1f}" for x in formulas if x]
