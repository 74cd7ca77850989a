"""Lesson 18: is a second node worth it? Predict the time of a step, then measure it.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  a cost model: latency, bandwidth, what DDP hides; weak and strong scaling
Run:       scripts/multinode_setup_and_run.sh day2/18_worth_a_second_node.py
Look for:  => ...: ... times predicted, ... measured (...), ... apart (limit ...); ...
Try next:  --batch-size 32; your own model: python scripts/predict_step.py --help
"""

import argparse
import math
import os
import sys
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel


class Link(NamedTuple):
    """What it costs to send a message from one rank to the next."""

    latency: float  # ms, however short the message is
    bandwidth: float  # MB per ms
    tree: bool  # NCCL can also add along a tree; gloo cannot


class Step(NamedTuple):
    """A step of DDP, as measured: without sending anything, and as usual."""

    ranks: int
    batch_size: int  # samples on each rank
    link: Link
    sizes: list  # MB of gradients in each of DDP's buckets
    times: list  # ms until each bucket is full, backward ends, the step ends
    measured: float = math.nan  # ms of a step that sends
    silent: bool = True  # whether the first kind has really sent nothing


def all_reduce_ms(megabytes, ranks, link):
    """Return the ms that one all_reduce takes."""
    # Ring: 2 (n - 1) messages, one after the other, each with an n-th of the numbers.
    messages = 2 * (ranks - 1)
    ring = messages * (link.latency + megabytes / ranks / link.bandwidth)
    if not link.tree:
        return ring
    # Tree: all numbers go up and down again, in only log2(n) levels. They go in small
    # pieces, so that the levels work at the same time.
    levels = math.ceil(math.log2(ranks))
    return min(ring, 2 * levels * link.latency + 2 * megabytes / link.bandwidth)


def step_ms(step):
    """Return the ms that a step of DDP takes, as predicted."""
    *full_at, end_of_backward, end = step.times
    sent = 0.0
    for megabytes, moment in zip(step.sizes, full_at, strict=True):
        # A bucket is sent when it is full and those before it have been sent. What is
        # sent while backward still computes is hidden: it costs no extra time.
        sent = max(sent, moment) + all_reduce_ms(megabytes, step.ranks, step.link)
    optimizer = end - end_of_backward
    return max(sent, end_of_backward) + optimizer


def measure_link(group, device):
    """Return the Link between the ranks of a group. All its ranks must call this."""
    ranks = dist.get_world_size(group)
    tree = dist.get_backend(group) != "gloo"
    if ranks == 1:
        return Link(0.0, math.inf, tree)  # nothing is sent
    short = message_ms(1, group, device)
    # A GPU's link takes 3 MB in less time than the CPU needs to ask for it.
    megabytes = 3.3 if device.type == "cpu" else 64.0
    long = message_ms(round(megabytes * 250_000), group, device)
    # all_reduce_ms, solved for latency and bandwidth. One number has next to no size.
    messages = 2 * (ranks - 1)
    fewest = min(messages, 2 * math.ceil(math.log2(ranks))) if tree else messages
    bandwidth = messages / ranks * megabytes / max(long - short, 1e-3)
    return Link(short / fewest, bandwidth, tree)


def measure_step(batch_size, link, group, device):
    """Return the Step of a group's slowest rank. All its ranks must call this."""
    sizes = []
    moments = []

    def note(state, bucket):
        """Note that a bucket is full. DDP calls this in backward."""
        sizes.append(bucket.buffer().nbytes / 1e6)
        moments.append(now(device))
        return debugging_hooks.noop_hook(state, bucket)  # send nothing

    silent = prepare(batch_size, group, device)
    silent[0].register_comm_hook(None, note)
    usual = prepare(batch_size, group, device)
    rows = []
    for _ in range(STEPS):
        sizes.clear()
        times = take_step(silent, moments, device)
        dist.barrier(group)  # begin together
        times.append(take_step(usual, moments, device)[-1])
        rows.append(times)
    # The first steps allocate memory, and then DDP forms new buckets: not counted.
    times = torch.tensor(rows[WARM_UP:], device=device).median(dim=0).values
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    *times, measured = times.tolist()
    # Each rank has trained on its own images: if nothing was sent, weights differ.
    weights = nn.utils.parameters_to_vector(silent[0].parameters()).detach().cpu()
    sums = [None] * dist.get_world_size(group)
    dist.all_gather_object(sums, weights.double().sum().item(), group=group)
    differ = len(sums) == 1 or len(set(sums)) > 1
    return Step(len(sums), batch_size, link, sizes, times, measured, differ)


def main(device, args):
    """Run on every rank: several times on the first node alone and on all; compare."""
    first_node, ranks, unit = make_first_node()
    rounds = []
    for _ in range(ROUNDS):
        steps = []
        for group in (first_node, dist.group.WORLD):
            if dist.get_rank(group) >= 0:  # -1 on a rank that is not in the group
                link = measure_link(group, device)
                steps.append(measure_step(args.batch_size, link, group, device))
            dist.barrier()  # the others wait here
        # Weak scaling: each rank has as many samples as before. Strong scaling: all
        # ranks together have as many as the first node had.
        share = max(1, args.batch_size * ranks // dist.get_world_size())
        steps.append(measure_step(share, link, group, device))
        rounds.append(steps)
    if dist.get_rank() == 0:
        return report(rounds, unit)


# ---- Shared helpers, identical in every lesson

ROUNDS = 5
STEPS = 8
WARM_UP = 3  # of these steps
# Two nodes that are worth it are 1 to 2 times as fast as one. A prediction that is
# wrong by a factor of 2 (100% apart) cannot tell whether they are.
LIMIT = 1.0


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def make_first_node():
    """Return a group of the first node's ranks, their number, and "node".

    If there is only one node, of the first rank, 1, "rank". All ranks must call this.
    """
    ranks = gather(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))[0]
    unit = "node" if ranks < dist.get_world_size() else "rank"
    if unit == "rank":
        ranks = 1
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    return dist.new_group(range(ranks), timeout=timeout), ranks, unit


def prepare(batch_size, group, device):
    """Return a model in DDP, its optimizer, random images, and their labels."""
    torch.manual_seed(dist.get_rank())
    images = torch.rand(batch_size, 1, 28, 28)
    labels = torch.randint(10, (batch_size,))
    model = nn.Sequential(  # like lesson 2's, but with 3.3 MB of gradients
        nn.Conv2d(1, 16, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 1536),
        nn.ReLU(),
        nn.Linear(1536, 10),
    )
    # DDP copies the weights of the group's first rank to the others.
    model = DistributedDataParallel(model.to(device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return model, optimizer, images.to(device), labels.to(device)


def take_step(training, moments, device):
    """Return the ms until each moment that a hook adds, backward's end, and the end."""
    model, optimizer, images, labels = training
    moments.clear()
    begin = now(device)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    moments.append(now(device))
    optimizer.step()
    moments.append(now(device))
    return [moment - begin for moment in moments]


def message_ms(numbers, group, device):
    """Return the ms that an all_reduce of so many numbers in float32 takes."""
    tensor = torch.ones(numbers, device=device)
    times = []
    for _ in range(6):
        dist.barrier(group)
        begin = now(device)
        for _ in range(4):
            dist.all_reduce(tensor, group=group)
        times.append((now(device) - begin) / 4)
    times = torch.tensor(times[1:], device=device)  # the first sets up connections
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)  # the slowest rank counts
    return times.median().item()


def now(device):
    """Return this moment in ms, once the device has done what it was given to do."""
    torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
    return time.perf_counter() * 1e3


def gains(steps):
    """Return the second Step's samples/s over the first one's: measured, predicted."""
    node, many = steps[:2]
    samples = many.ranks * many.batch_size / (node.ranks * node.batch_size)
    measured = samples * node.measured / many.measured
    return measured, samples * step_ms(node) / step_ms(many)


def report(rounds, unit):
    """Print what was measured and predicted. Return the exit status.

    rounds: lists of Steps, on the first node, on all in weak scaling, and in strong.
    """
    rounds.sort(key=gains)  # by what was measured; the round in the middle counts
    node, weak, strong = rounds[len(rounds) // 2]
    hop = f"{weak.link.latency:.3f} ms + size / {weak.link.bandwidth * 8:.3g} Gbit/s"
    sizes = " and ".join(f"{size:.3g}" for size in weak.sizes)
    if weak.ranks > 1:
        print(f"{weak.ranks} ranks: one hop takes {hop}; buckets of {sizes} MB")
    for step in (node, weak, strong):
        computing = step.times[-1]
        sending = sum(all_reduce_ms(x, step.ranks, step.link) for x in step.sizes)
        predicted = step_ms(step)
        parts = f"{computing:.1f} computing + {sending:.1f} sending"
        parts += f" - {computing + sending - predicted:.1f} hidden"
        times = f"{parts} = {predicted:.1f} ms, took {step.measured:.1f}"
        print(f"{counted(step.ranks, 'rank')} x {step.batch_size}: {times}")
    nodes = weak.ranks / node.ranks
    for name, many in (("weak", weak), ("strong", strong)):
        measured, predicted = gains([node, many])
        line = f"{name} scaling: {predicted:.3g} times as fast predicted, "
        print(f"{line}{measured:.3g} measured, efficiency {measured / nodes:.0%}")
    return report_verdict(rounds, nodes, unit)


def report_verdict(rounds, nodes, unit):
    """Print the proof line of the rounds, in order of their gain; return the status."""
    measured, predicted = zip(*[gains(steps) for steps in rounds])
    ratios = [x / y for x, y in zip(measured, predicted)]
    aparts = [max(ratio, 1 / ratio) - 1 for ratio in ratios]
    middle = len(rounds) // 2
    claim = f"{counted(nodes, unit)}: {predicted[middle]:.3g} times predicted, "
    claim += f"{measured[middle]:.3g} measured "
    claim += f"({measured[0]:.3g} to {measured[-1]:.3g}), "
    claim += f"{aparts[middle]:.0%} apart (limit {LIMIT:.0%})"
    holds = min(aparts) <= LIMIT
    if holds and aparts[middle] > LIMIT:
        claim += f", in another round {min(aparts):.0%}: too busy to tell"
    if not all(step.silent for steps in rounds for step in steps):
        claim += ", but steps that should send nothing have sent"
        holds = False
    # Worth it: as long as each node does at least half of what a single one does. With
    # as many nodes as there are here, the measurement decides, not the prediction.
    node, weak, _ = rounds[middle]
    worth = {nodes: measured[middle], 1: 1.0}
    for count in range(2, math.ceil(nodes)):
        some = weak._replace(ranks=count * node.ranks)
        worth[count] = gains([node, some])[1]
    best = max(count for count, gain in worth.items() if gain >= count / 2)
    return prove(f"{claim}; worth it up to {counted(best, unit)}", holds)


def counted(count, word):
    """Return a number and a word, such as 1 node, or 2 nodes."""
    return f"{count:g} {word}" + "s" * (count > 1)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def choose_device(local_rank, local_world_size):
    """Return this rank's device, and the backend that connects such devices."""
    torch.set_num_threads(1)  # more would spin while they wait: slow on busy cores
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    # Where each rank sees its own GPU only, the launcher says how many the node has.
    shared = local_world_size > int(os.environ.get("GPUS_ON_NODE", gpus))
    if kind in ("cpu", "mps") or (kind == "xpu" and shared):
        return torch.device("cpu"), "gloo"  # gloo cannot use Apple's mps, Intel's xpu
    device = torch.device(kind, local_rank % gpus)
    torch.accelerator.set_device_index(device.index)
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def start(args):
    """Run as one rank: join the process group, call main, leave the group."""
    # Variables tell a process who it is. LOCAL_RANK: its number on this node. The other
    # four, RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, are for init_process_group.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    parser.add_argument("--batch-size", type=int, default=128, help="per process (128)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    if not 0 < args.batch_size < 2**31:
        parser.error("batch size must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
