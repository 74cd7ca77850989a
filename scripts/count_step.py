"""Count what one rank of many sends and holds in a step, without the ranks and without memory.

Usage: scripts/count_step.py 70B --shards 128 --tensor 8 --tokens 8192

PyTorch's own fully_shard and parallelize_module divide a Llama of this size, with sequence parallel
and a divided loss. Tensors have a shape and no memory, and messages go nowhere, so one process can
be rank 0 of thousands. Context ranks gather keys and values, as Llama 3's do. What is printed is a
row of the table on lesson 21's page, in GB: counted / by the formulas in formulas.py.
"""

import argparse
import sys

from formulas import MODELS, Layout, holds, sends
from processes import exit_with

MADE_FOR = "2.15"


def count(model, layout, tokens, again):
    """Return what is counted and what the formulas say, in bytes: {what: (counted, formula)}."""
    import torch

    try:
        from counting import count_on_fake_ranks

        messages, peak = count_on_fake_ranks(model, layout, tokens, again)
    except (ImportError, AttributeError, TypeError, NotImplementedError, StopIteration) as error:
        differs = f"and in this one, {torch.__version__}, something has moved: {error}"
        sys.exit(f"This was made for torch {MADE_FOR}, {differs}")
    formulas = sends(model, layout, tokens, again)
    found = {way: (messages.sent[way], formula) for way, formula in formulas.items()}
    return found | {"memory": (peak, sum(holds(model, layout, tokens, again).values()))}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", choices=MODELS)
    for way in Layout._fields:
        add(f"--{way}", type=int, default=1, help=f"{way} (1)")
    add("--tokens", type=int, default=4096, help="of a rank's piece of the texts (4096)")
    add("--checkpointing", action="store_true", help="keep only what goes into each layer")
    args = parser.parse_args()
    model, layout = MODELS[args.model], Layout(*(getattr(args, way) for way in Layout._fields))
    if min(*layout, args.tokens) < 1 or layout.ranks > 2**16 or args.tokens > 2**24:
        parser.error("every number must be at least 1, with at most 65,536 ranks")
    if model.kv_heads % args.tensor or args.tokens % args.tensor:
        parser.error("--tensor must divide the tokens, and the 8 key and value heads (7B: 32)")
    found = count(model, layout, args.tokens, args.checkpointing)
    sizes = " x ".join(f"{way} {size}" for way, size in layout._asdict().items() if size > 1)
    again = ", checkpointing" if args.checkpointing else ""
    cells = [f"{own / 1e9:.1f} / {formula / 1e9:.1f}" for own, formula in found.values()]
    print("| model | ranks |", " | ".join(found), "|")
    print(f"| {args.model}, {args.tokens:,} tokens{again} | {layout.ranks:,}: {sizes} |", end=" ")
    print(" | ".join(cells), "|")


if __name__ == "__main__":
    exit_with(main)
