"""Predict how fast a model trains on nodes that you don't have yet.

Usage: scripts/predict_step.py --parameters 25e6 --step-ms 180 --samples 64
                               [--nodes 1 2 4 8] [--gpus-per-node 4] [--link 200Gbit]

The formulas are lesson 18's, with NCCL's ring or tree, messages of 25 MB, and two thirds of a step
in backward. A ring's latencies add up, and most hops stay in a node: give the mean of lesson 18.
"""

import argparse
import functools
import math
import re

from catalog import load
from formulas import operations

BUCKET = 25  # MB, at most
FORWARD = 1 / 3  # of a step


@functools.cache
def lesson():
    """Return lesson 18, which imports torch: only once the arguments are known to be right."""
    return load("day2/18_worth_a_second_node.py")


def make_step(ranks, samples, args):
    """Return lesson 18's Step on so many ranks, each with so many samples."""
    megabytes = args.parameters * args.bytes / 2 / 1e6  # an all_reduce sends everything twice
    count = math.ceil(megabytes / BUCKET)
    ms = args.step_ms * samples / args.samples
    full_at = [ms * (FORWARD + (1 - FORWARD) * (i + 1) / count) for i in range(count)]
    latency, gigabits = args.latency_us / 1e3, args.link
    if ranks <= args.gpus_per_node:
        latency, gigabits = 0.02, args.link_within
    link = lesson().Link(latency, gigabits / 8, tree=True)
    return lesson().Step(ranks, samples, link, [megabytes / count] * count, [*full_at, ms, ms])


def gigaflops(args):
    """Return the 1e9 operations of a text, forward and backward, with attention's."""
    length = args.tokens_per_sample
    return length * operations(args.parameters, args.layers, args.width, length) / 1e9


def table(all_ranks, args):
    """Yield the lines of the table: what lesson 18 calls weak and strong scaling."""
    in_all = args.samples * args.gpus_per_node
    weak = f"weak: {args.samples} samples per GPU"
    columns = f"{'ms':>8} {'samples/s':>10} {'efficiency':>10}"
    columns += f" {'MFU':>6}" if args.peak_tflops else ""
    columns += f" {'tokens/s':>12}" if args.tokens_per_sample else ""
    yield f"{'':6} {weak:{len(columns)}} strong: {in_all} samples in total"
    yield f"{'GPUs':>6} {columns} {columns}"
    for ranks in all_ranks:
        line = f"{ranks:6}"
        for samples in (args.samples, in_all / ranks):
            if samples >= 1:  # at least one for each GPU
                ms = lesson().step_ms(make_step(ranks, samples, args))
                efficiency = samples / ms / (args.samples / args.step_ms)
                line += f" {ms:8.1f} {ranks * samples / ms * 1e3:10,.0f} {efficiency:10.0%}"
                if args.peak_tflops:
                    line += f" {samples / ms * gigaflops(args) / args.peak_tflops:6.1%}"
                if args.tokens_per_sample:
                    line += f" {ranks * samples / ms * 1e3 * args.tokens_per_sample:12,.0f}"
        yield line


def gigabits(text):
    """Return an argument such as 200Gbit or 100mbit as Gbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])bit", text.lower())
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be like 200Gbit or 100Mbit, not {text}")
    return float(match[1]) / (1000 if match[2] == "m" else 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parameters", type=float, required=True, help="of the model, such as 25e6")
    add("--bytes", type=float, default=8, help="sent for a parameter (8; in bf16: DDP 4, FSDP 6)")
    add("--step-ms", type=float, required=True, help="time of a step on one GPU")
    add("--samples", type=int, required=True, help="samples in this step")
    add("--nodes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of nodes (1 2 4 8)")
    add("--gpus-per-node", type=int, default=4, help="GPUs of each node (4)")
    add("--link", type=gigabits, default=10.0, help="speed between nodes (10Gbit)")
    add("--latency-us", type=float, default=20.0, help="latency of a hop, their mean (20)")
    add("--link-within", type=gigabits, default=400.0, help="speed in a node (400Gbit)")
    add("--tokens-per-sample", type=float, help="of a language model: adds tokens/s")
    add("--layers", type=float, help="of a language model: its number of layers")
    add("--width", type=float, help="and their width")
    add("--peak-tflops", type=float, help="of a GPU, 1e12 flops/s: adds MFU, achieved / peak")
    args = parser.parse_args()
    if args.peak_tflops and not (args.tokens_per_sample and args.layers and args.width):
        parser.error("--peak-tflops needs --tokens-per-sample, --layers and --width")
    given = [x for x in vars(args).values() if isinstance(x, int | float)]
    if not all(0 < x < 1e18 for x in [*given, *args.nodes]):  # nan is not, either
        parser.error("every number must be more than 0, and less than 1e18")
    if args.parameters * args.bytes > 1e14:
        parser.error(f"{args.parameters:g} parameters are more than any model has")
    speed = f"{args.link:g} Gbit/s between nodes, hops of {args.latency_us:g} us"
    print(f"assumed: {speed}, {args.link_within:g} Gbit/s in a node (--link-within)")
    ranks = {nodes * args.gpus_per_node for nodes in args.nodes}
    for line in table(sorted(ranks | {1, args.gpus_per_node}), args):
        print(line)
    best = 1
    node = make_step(args.gpus_per_node, args.samples, args)
    for nodes in sorted(args.nodes):
        many = make_step(nodes * args.gpus_per_node, args.samples, args)
        _, gain = lesson().gains([node, many])
        # As if no bucket were sent before backward ends.
        alone = [step._replace(times=[step.times[-2]] * len(step.times)) for step in (node, many)]
        _, serial = lesson().gains(alone)
        if gain >= nodes / 2:  # each node does at least half of what a single one does
            best = nodes
    name = lesson().counted(nodes, "node")
    print(f"{name}: {gain:.3g} times as fast as one, {serial:.3g} times if nothing is hidden")
    print(f"worth it up to {lesson().counted(best, 'node')}")


if __name__ == "__main__":
    main()
