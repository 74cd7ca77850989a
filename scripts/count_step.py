"""Count what one rank of many sends and holds in a step, without the ranks and without memory.

Usage: scripts/count_step.py 70B --shards 128 --tensor 8 --tokens 8192
       scripts/count_step.py --table     the six layouts of lesson 21's page, half a minute each

PyTorch's own fully_shard and parallelize_module divide a Llama of this size, with sequence parallel
and a divided loss. Tensors have a shape and no memory, and messages go nowhere, so one process can
be rank 0 of thousands. Context ranks gather keys and values, as Llama 3's do. Beside each number is
what formulas.py says.
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
    """Return what is counted and what the formulas say, in bytes: {what: (counted, formula)}."""
    import torch

    try:
        from counting import count_on_fake_ranks

        counted = count_on_fake_ranks(MODELS[name], layout, tokens, again)
    except (ImportError, AttributeError, TypeError, NotImplementedError, StopIteration) as error:
        differs = f"and in this one, {torch.__version__}, something has moved: {error}"
        sys.exit(f"This was made for torch {MADE_FOR}, {differs}")
    model = MODELS[name], layout, tokens, again
    found = {way: (counted.sent[way], formula) for way, formula in sends(*model).items()}
    return found | {"memory": (counted.peak, sum(holds(*model).values()))}


def named(name, layout, tokens, again):
    """Return the first two cells of a row of the table: the model and the layout."""
    sizes = " x ".join(f"{way} {size}" for way, size in layout._asdict().items() if size > 1)
    again = ", checkpointing" if again else ""
    return f"| {name}, {tokens:,} tokens{again} | {layout.ranks:,}: {sizes} |"


def row(*case):
    """Return a row of the table, in GB."""
    cells = [f"{own / 1e9:.1f} / {formula / 1e9:.1f}" for own, formula in count(*case).values()]
    return " ".join([named(*case), *(f"{x} |" if x != "0.0 / 0.0" else " |" for x in cells)])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", choices=MODELS)
    for way in Layout._fields:
        add(f"--{way}", type=int, default=1, help=f"{way} (1)")
    add("--tokens", type=int, default=4096, help="of a rank's piece of the texts (4096)")
    add("--checkpointing", action="store_true", help="keep only what goes into each layer")
    add("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        for line in TABLE:
            print(row(*line), flush=True)
        return
    if not args.model:
        parser.error("name a model, or --table")
    layout = Layout(*(getattr(args, way) for way in Layout._fields))
    if min(*layout, args.tokens) < 1 or layout.ranks > 2**16 or args.tokens > 2**24:
        parser.error("every number must be at least 1, with at most 65,536 ranks")
    if MODELS[args.model].kv_heads % args.tensor or args.tokens % args.tensor:
        parser.error("--tensor must divide the tokens, and the 8 key and value heads (7B: 32)")
    for what, pair in count(args.model, layout, args.tokens, args.checkpointing).items():
        print("{:9} {:10.3f} GB counted {:10.3f} by formula".format(what, *(x / 1e9 for x in pair)))


if __name__ == "__main__":
    exit_with(main)
