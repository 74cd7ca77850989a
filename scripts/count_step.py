"""Count what one rank of many sends and holds in a step, without the ranks and without memory.

Usage: scripts/count_step.py 70B --shards 128 --tensor 8 --tokens 8192
       scripts/count_step.py --table     the six layouts of day2/CHOOSE.md

PyTorch's own fully_shard and parallelize_module divide a Llama of this size, with sequence parallel
and a divided loss. Tensors have shapes and no memory, and messages go nowhere, so one process can be
rank 0 of thousands. Beside each number is what formulas.py says. Context ranks gather keys and
values, as Llama 3's do.
"""

import argparse
import sys

from formulas import MODELS, Layout, holds, sends
from processes import exit_with

MADE_FOR = "2.15"
TABLE = [
    ("8B", Layout(shards=8), 8192, True),
    ("8B", Layout(replicas=8, shards=8), 4096, False),
    ("8B", Layout(shards=8, tensor=8), 8192, False),
    ("70B", Layout(shards=4, context=4, tensor=8), 32768, True),
    ("70B", Layout(shards=128, tensor=8), 8192, False),
    ("70B", Layout(replicas=4, shards=128, tensor=8), 8192, True),
]


def count(name, layout, tokens, again):
    """Return what the fake ranks count, and the formulas: {what: (counted, formula)} in GB."""
    try:
        import torch
        import torch.distributed as dist
        from counting import count
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        counted = count(MODELS[name], layout, tokens, again, mode)
        dist.destroy_process_group()
    except (ImportError, AttributeError, TypeError, NotImplementedError) as error:
        sys.exit(f"made for torch {MADE_FOR}, and this one, {torch.__version__}, differs: {error}")
    found = {"memory": (counted.peak, sum(holds(MODELS[name], layout, tokens, again).values()))}
    for way, formula in sends(MODELS[name], layout, tokens, again).items():
        found[way] = (counted.sent[way], formula)
    return found, counted

