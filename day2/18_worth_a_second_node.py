"""Lesson 18: is a second node worth it? Predict the time of a step, then measure it.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  a cost model: latency, bandwidth, what DDP hides; weak and strong scaling
Run:       scripts/multinode_setup_and_run.sh day2/18_worth_a_second_node.py
Look for:  => ...: ... times predicted, ... measured (...), ... apart (limit ...); ...
Try next:  --batch-size 32; your model: --parameters 25e6 --step-ms 180 --samples 64
"""

import argparse
import math
import os
import re
import socket
import statistics
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

    batch_size: int
    sizes: list  # MB of gradients in each of DDP's buckets
    times: torch.Tensor  # ms until each bucket is full, backward ends, the step ends
    measured: float  # ms of a step that sends
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


def step_ms(step, ranks, link, hides=True):
    """Return the ms that a step of DDP takes on so many ranks."""
    *full_at, end_of_backward, end = step.times.tolist()
    if not hides:  # nothing is sent before backward ends
        full_at = [end_of_backward] * len(full_at)
    sent = 0.0
    for megabytes, moment in zip(step.sizes, full_at, strict=True):
        # A bucket is sent when it is full and those before it have been sent. What is
        # sent while backward still computes is hidden: it costs no time of its own.
        sent = max(sent, moment) + all_reduce_ms(megabytes, ranks, link)
    optimizer = end - end_of_backward
    return max(sent, end_of_backward) + optimizer


def measure_step(batch_size, group, device, args):
    """Return the Step of a group: of each time that of the slowest rank.

    All ranks of the group must call this.
    """
    sizes = []
    clock = []

    def note(state, bucket):
        """Note that a bucket is full. DDP calls this in backward."""
        sizes.append(bucket.buffer().nbytes / 1e6)
        clock.append(timestamp(device))
        return debugging_hooks.noop_hook(state, bucket)  # send nothing

    silent = prepare(batch_size, group, device, args)
    silent[0].register_comm_hook(None, note)
    usual = prepare(batch_size, group, device, args)
    rows = []
    for _ in range(args.steps):
        sizes.clear()
        times = take_step(silent, clock, device)
        dist.barrier(group)  # begin together
        times.append(take_step(usual, clock, device)[-1])
        rows.append(times)
    # The first steps allocate memory, and then DDP forms new buckets: not counted.
    times = torch.tensor(rows[WARM_UP:], device=device).median(dim=0).values
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    times, measured = times[:-1].cpu(), times[-1].item()
    return Step(batch_size, sizes, times, measured, is_silent(silent[0], group))


def measure_link(megabytes, group, device):
    """Return the Link between the ranks of a group. All its ranks must call this."""
    ranks = dist.get_world_size(group)
    tree = dist.get_backend(group) != "gloo"
    short = statistics.median(time_all_reduce(1, device, group))
    numbers = round(megabytes * 250_000)
    long = statistics.median(time_all_reduce(numbers, device, group))
    times = torch.tensor([short, long], device=device) * 1e3
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    short, long = times.tolist()
    # all_reduce_ms, solved for latency and bandwidth. One number has next to no size.
    messages = 2 * (ranks - 1)
    fewest = min(messages, 2 * math.ceil(math.log2(ranks))) if tree else messages
    bandwidth = messages / ranks * megabytes / max(long - short, 1e-3)
    return Link(short / fewest, bandwidth, tree)


def main(device, args):
    """Run on every rank: several times on the first node alone and on all; compare."""
    nodes, first_node = make_first_node()
    rounds = []
    for _ in range(ROUNDS):
        settings = []
        for group in (first_node, dist.group.WORLD):
            if dist.get_rank(group) >= 0:  # -1 on a rank that is not in the group
                settings.append(measure_setting(group, device, args))
            dist.barrier()  # the others wait here
        rounds.append(settings)
    if len(set(gather(socket.gethostname()))) == 1:
        # Links inside a machine say nothing about a network: beyond it, assume one.
        args.link = args.link or 10.0
    if dist.get_rank() == 0:
        rounds.sort(key=measured_gain)
        alone, together = rounds[ROUNDS // 2]
        report_parts(alone, together, args)
        ranks = {2**i for i in range(11)} | {alone.ranks, together.ranks}
        rows = report_predictions(sorted(ranks), alone, together, args)
        return report_verdict(rows, rounds, "node" if nodes > 1 else "rank")


# ---- The same in every lesson that has it; explained on the page of the first one

WARM_UP = 3  # steps
ROUNDS = 5
# Two nodes that are worth it are 1 to 2 times as fast as one. A prediction that is
# wrong by a factor of 2 (100% apart) cannot tell whether they are.
LIMIT = 1.0


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


class Setting(NamedTuple):
    """What was measured on so many ranks, with two batch sizes."""

    ranks: int
    link: Link
    small: Step
    large: Step


def make_first_node():
    """Return the number of nodes, and the group of the first node's ranks.

    If there is only one node, the group has only its first rank.
    """
    # The ranks of a node follow each other, so all of them find the same first one.
    firsts = gather(dist.get_rank() - int(os.environ["LOCAL_RANK"]))
    nodes = len(set(firsts))
    ranks = [rank for rank, first in enumerate(firsts) if first == 0]
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    return nodes, dist.new_group(ranks if nodes > 1 else [0], timeout=timeout)


def prepare(batch_size, group, device, args):
    """Return a model in DDP, its optimizer, a batch of random images and its labels.

    It is the same batch in each step: how data is loaded is not measured here.
    """
    torch.manual_seed(args.seed + dist.get_rank())
    images = torch.randint(256, (batch_size, 28, 28), dtype=torch.uint8)
    labels = torch.randint(10, (batch_size,))
    # DDP copies the weights of the group's first rank to the others.
    model = DistributedDataParallel(Net().to(device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return model, optimizer, images.to(device), labels.to(device)


def take_step(training, clock, device):
    """Train on the batch. Return the ms until each moment in clock.

    They are those that a hook adds in backward, the end of backward, and the end.
    """
    model, optimizer, images, labels = training
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    clock.clear()
    begin = timestamp(device)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    clock.append(timestamp(device))
    optimizer.step()
    clock.append(timestamp(device))
    synchronize()
    if device.type == "cpu":
        return [(end - begin) * 1e3 for end in clock]
    return [begin.elapsed_time(end) for end in clock]


def timestamp(device):
    """Return this moment, on a GPU as an event: the CPU is ahead of the GPU's work."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def is_silent(model, group):
    """Return whether a group's ranks have weights of their own: nothing was sent.

    All ranks of the group must call this. Each has trained on images of its own.
    """
    norm = nn.utils.parameters_to_vector(model.parameters()).detach().norm()
    low, high = norm.clone(), norm.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return low.item() < high.item() or dist.get_world_size(group) == 1


def measure_setting(group, device, args):
    """Return the Setting of a group of ranks. All of its ranks must call this."""
    small = measure_step(max(1, args.batch_size // 4), group, device, args)
    large = measure_step(args.batch_size, group, device, args)
    link = assumed_link(args)
    if dist.get_world_size(group) > 1:
        # A GPU's link takes 3 MB in less time than the CPU needs to ask for it.
        megabytes = sum(large.sizes) if device.type == "cpu" else 64.0
        link = measure_link(megabytes, group, device)
    return Setting(dist.get_world_size(group), link, small, large)


def assumed_link(args):
    """Return the link between nodes that are not here, with NCCL."""
    return Link(args.latency_us / 1e3, (args.link or 10.0) / 8, tree=True)


def plan(args):
    """Predict for a model that is only described, in this process alone."""
    megabytes = args.parameters * 4 / 1e6  # gradients in float32
    # DDP's buckets hold about 25 MB. We assume that backward takes two thirds of a
    # step, and fills them one after the other.
    count = math.ceil(megabytes / 25)
    sizes = [megabytes / count] * count
    full = torch.tensor(sizes, dtype=torch.float64).cumsum(0) / megabytes
    times = args.step_ms * torch.cat([1 / 3 + 2 / 3 * full, torch.ones(2)])
    large = Step(args.samples, sizes, times, math.nan)
    small = Step(0, sizes, torch.zeros_like(times), math.nan)
    within = Link(0.02, args.link_within / 8, tree=True)
    most = max(args.nodes) * args.gpus_per_node
    speed = f"{args.link or 10:g} Gbit/s and {args.latency_us:g} us between nodes"
    print(f"assumed: {speed}, {args.link_within:g} Gbit/s in a node (--link-within)")
    settings = [
        Setting(args.gpus_per_node, within, small, large),
        Setting(most, assumed_link(args), small, large),
    ]
    args.batch_size = args.samples
    ranks = {1} | {nodes * args.gpus_per_node for nodes in [1, *args.nodes]}
    rows = report_predictions(sorted(ranks), *settings, args)
    return report_verdict(rows, [settings], "node")


def predict(ranks, batch_size, alone, together, args):
    """Return the ms of a step on so many ranks, with batch_size samples on each."""
    setting = alone if ranks <= alone.ranks else together
    small, large = setting.small, setting.large
    # With another batch size: on the line through the two that were measured. On a busy
    # machine it may seem to fall, but more samples take no less time.
    share = (batch_size - large.batch_size) / (large.batch_size - small.batch_size)
    times = large.times + share * (large.times - small.times).clamp(min=0)
    step = Step(batch_size, large.sizes, times.clamp(min=0), math.nan)
    beyond = ranks > together.ranks and args.link  # more nodes than are here
    return step_ms(step, ranks, assumed_link(args) if beyond else setting.link)


def report_parts(alone, together, args):
    """Print what was measured, and what it makes of a step."""
    for setting in [alone, together] if alone.ranks < together.ranks else [together]:
        ranks, link = setting.ranks, setting.link
        name = f"{ranks} ranks" if ranks > 1 else "1 rank"
        if ranks > 1:
            speed = f"{link.latency:.3f} ms + size / {link.bandwidth * 8:.3g} Gbit/s"
            sizes = " and ".join(f"{size:.3g}" for size in setting.large.sizes)
            print(f"{name}: one hop takes {speed}; buckets of {sizes} MB")
        for step in (setting.small, setting.large):
            computing = step.times[-1]
            sending = sum(all_reduce_ms(size, ranks, link) for size in step.sizes)
            predicted = step_ms(step, ranks, link)
            parts = f"{computing:.1f} computing"
            if ranks > 1:
                hidden = computing + sending - predicted
                parts += f" + {sending:.1f} sending - {hidden:.1f} hidden"
            line = f"{parts} = {predicted:.1f} ms, took {step.measured:.1f}"
            print(f"{name} x {step.batch_size}: {line}")
    if args.link:
        speed = f"{args.link:g} Gbit/s and {args.latency_us:g} us between nodes"
        print(f"on more than {together.ranks} ranks: assumed, {speed} (--link)")


def report_predictions(all_ranks, alone, together, args):
    """Print a table. Return {ranks: [samples/s of weak scaling, of strong scaling]}.

    Efficiency is what a rank does, as a share of what it does when it is alone.
    """
    in_all = args.batch_size * alone.ranks
    ideal = args.batch_size / predict(1, args.batch_size, alone, together, args)
    head = f"weak: {args.batch_size} samples per rank"
    print(f"{'':6} {head:43} strong: {in_all} samples in total")
    columns = f"{'ms':>8} {'samples/s':>10} {'efficiency':>10}"
    print(f"{'ranks':>6} {columns} {'rank-h/10^6':>12} {columns}")
    rows = {}
    for ranks in all_ranks:
        line = f"{ranks:6}"
        speeds = []
        for batch_size in (args.batch_size, in_all / ranks):
            if batch_size < 1:
                continue  # less than a sample for each rank
            ms = predict(ranks, batch_size, alone, together, args)
            speeds.append(ranks * batch_size / ms * 1e3)
            efficiency = batch_size / ms / ideal
            line += f" {ms:8.1f} {speeds[-1]:10,.0f} {efficiency:10.0%}"
            if len(speeds) == 1:
                line += f" {1e6 / speeds[0] / 3600 * ranks:12.3f}"
        print(line)
        rows[ranks] = speeds
    return rows


def measured_gain(settings):
    """Return how many times as fast all ranks are as the first node; NaN if not run."""
    alone, together = settings
    gain = alone.large.measured / together.large.measured
    return gain * together.ranks / alone.ranks


def predicted_gain(settings, hides=True):
    """Return the same, as predicted."""
    one, many = [step_ms(s.large, s.ranks, s.link, hides) for s in settings]
    alone, together = settings
    return one / many * together.ranks / alone.ranks


def report_verdict(rows, rounds, unit):
    """Print the gain over one node (or one rank, if all are on one), and its limit.

    rounds: [[alone, together], ...], sorted by the measured gain. The one in the middle
    counts. Return the exit status.
    """
    middle = len(rounds) // 2
    alone, together = rounds[middle]
    count = together.ranks / alone.ranks
    name = f"{count:g} {unit}" + "s" * (count > 1)
    predicted = predicted_gain(rounds[middle])
    serial = predicted_gain(rounds[middle], hides=False)
    print(f"{name}, if nothing is hidden (see test-profile): {serial:.3g} times")
    gains = [measured_gain(settings) for settings in rounds]
    measured = gains[middle]
    claim = f"{name}: {predicted:.3g} times predicted, "
    if math.isnan(measured):
        claim += "nothing measured"
        holds = True
    else:
        ratios = [predicted_gain(pair) / gain for pair, gain in zip(rounds, gains)]
        aparts = [max(ratio, 1 / ratio) - 1 for ratio in ratios]
        claim += f"{measured:.3g} measured ({gains[0]:.3g} to {gains[-1]:.3g}), "
        claim += f"{aparts[middle]:.0%} apart (limit {LIMIT:.0%})"
        holds = min(aparts) <= LIMIT
        if holds and aparts[middle] > LIMIT:
            claim += f", in another round {min(aparts):.0%}: too busy to tell"
        if not all(setting.large.silent for pair in rounds for setting in pair):
            claim += ", but steps that should send nothing have sent"
            holds = False
    # Worth it: as long as each node does at least half of what a single one does. With
    # as many nodes as there are here, the measurement decides, not the prediction.
    one = rows[alone.ranks][0]
    here = [n for n in rows if n % alone.ranks == 0 and n <= together.ranks]
    all_gains = {n / alone.ranks: rows[n][0] / one for n in here}
    if measured > 0:
        all_gains[count] = measured
    best = max(nodes for nodes, gain in all_gains.items() if gain >= nodes / 2)
    worth_it = f"worth it up to {best:g} {unit}" + "s" * (best > 1)
    return prove(f"{claim}; {worth_it}", holds)


def time_all_reduce(numbers, device, group):
    """Return the seconds that one all_reduce of float32 numbers took, 5 times."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor, group=group)  # sets up connections: not timed
    seconds = []
    for _ in range(5):
        torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(4):
            dist.all_reduce(tensor, group=group)
        # The calls return before a GPU has done the work. Wait, then read the clock.
        torch.get_device_module(device).synchronize()
        seconds.append((time.perf_counter() - begin) / 4)
    return seconds


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Net(nn.Module):
    """Lesson 2's, but with 3.3 MB of gradients: uint8 [N, 28, 28] to scores [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 1536)
        self.fc2 = nn.Linear(1536, 10)

    def forward(self, images):
        x = images.unsqueeze(1) / 255  # float32 [N, 1, 28, 28], from 0 to 1
        x = (x - 0.1307) / 0.3081  # mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind in ("cpu", "mps"):  # there are no collectives for Apple's GPU
        return torch.device("cpu"), "gloo"
    device = torch.device(kind, local_rank % count)
    # Where Slurm shows a rank only its own GPU, the launcher says how many there are.
    # Parts of a GPU (MIG) do not count: NCCL takes two of them for the same GPU.
    if count == 1 and "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        count = int(os.environ.get("GPUS_ON_NODE", 1))
    shared = local_world_size > count
    if kind == "xpu" and (shared or not dist.is_xccl_available()):
        return torch.device("cpu"), "gloo"  # gloo cannot carry tensors of Intel's GPUs
    torch.accelerator.set_device_index(device.index)
    # We compare runs: a run must give the same numbers again, with little rounding
    # (TF32 keeps 11 of float32's 24 bits). A real job may leave out these lines.
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    torch.backends.cuda.matmul.allow_tf32 = False  # True in NVIDIA's containers
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and newer
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def start(*arguments):
    """Run as one rank: join the process group, call main, leave the group."""
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, backend = choose_device(local_rank, local_world_size)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    # NCCL's other way to connect hangs at random before torch 2.7.1 (pytorch#153960).
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    device_id = None if backend == "gloo" else device  # with it, NCCL connects at once
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        setting = f"device: {device.type}, backend: {backend}"
        print(f"ranks: {dist.get_world_size()}, {setting}")
    status = main(device, *arguments)
    # The others wait here while rank 0 still works, at most as long as the timeout.
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    # gloo's threads may still be freeing tensors, and need Python for that. Without a
    # pause, torch before 2.8 can hang in the next line (pytorch#154976), and Python can
    # abort while it ends.
    time.sleep(0.2)
    dist.destroy_process_group()
    sys.exit(status)  # of rank 0: whether the lesson has proved its claim


def positive_int(text):
    """Return an argument as a whole number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        problem = f"must be a whole number greater than 0, not {text}"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def positive_float(text):
    """Return an argument as a number greater than 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return number


def more_steps(text):
    """Return an argument as a number of steps, if some are left after the warm-up."""
    if positive_int(text) <= WARM_UP:
        raise argparse.ArgumentTypeError(f"must be more than {WARM_UP}, not {text}")
    return int(text)


def gigabits(text):
    """Return an argument such as 200Gbit or 100mbit as Gbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])bit", text.lower())
    if not match or float(match[1]) == 0:
        problem = f"must be like 200Gbit or 100Mbit, not {text}"
        raise argparse.ArgumentTypeError(problem)
    return float(match[1]) / (1000 if match[2] == "m" else 1)


def numbers(text):
    """Return an argument such as 1,2,4 as a list of whole numbers."""
    return sorted({positive_int(part) for part in text.split(",")})


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--batch-size", type=positive_int, default=128, help="per process (128)")
    steps = "in each of 5 rounds, 3 of them to warm up (8)"
    add("--steps", type=more_steps, default=8, help=steps)
    add("--seed", type=int, default=0, help="for weights and images (0)")
    add("--link", type=gigabits, help="between nodes that are not here (10Gbit)")
    add("--latency-us", type=positive_float, default=20.0, help="of that link (20)")
    own = parser.add_argument_group("predict for your own model, without running it")
    add = own.add_argument
    add("--parameters", type=positive_float, help="how many, in fp32: 25e6")
    add("--step-ms", type=positive_float, help="of a step on one GPU")
    add("--samples", type=positive_int, help="in this step")
    add("--nodes", type=numbers, default=[1, 2, 4, 8], help="to predict for: 1,2,4,8")
    add("--gpus-per-node", type=positive_int, default=4, help="(4)")
    add("--link-within", type=gigabits, default=400.0, help="in a node (400Gbit)")
    args = parser.parse_args()
    if args.parameters:
        if not (args.step_ms and args.samples):
            parser.error("--parameters needs --step-ms and --samples")
    elif args.batch_size == 1:
        parser.error("--batch-size must be at least 2: a smaller one is measured, too")
    elif "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    return args


if __name__ == "__main__":
    args = parse_args()
    if args.parameters:
        sys.exit(plan(args))
    else:
        start(args)
