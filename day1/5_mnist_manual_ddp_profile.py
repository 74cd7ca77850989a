"""Lesson 5: where does the time go? The profiler knows.

Builds on: 4_mnist_manual_ddp.py
New here:  profile, schedule, trace
Run:       python day1/5_mnist_manual_ddp_profile.py [processes]
Look for:  => communication hidden by computing: ... (limit 5%): ok
Try next:  --batch-size 8 and --batch-size 512: what happens to communication?
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST


def average_gradients(model):
    """Replace each gradient by its mean over the ranks. Every rank must call this."""
    if not hasattr(model, "all_ranks"):  # only once: every message costs time
        trained = [x.requires_grad for x in model.parameters()]  # False: frozen
        model.all_ranks = gather(trained)
        assert all(x == trained for x in model.all_ranks), "ranks froze other layers"
    gradients = [x.grad for x in model.parameters() if x.requires_grad]  # not frozen
    assert None not in gradients, "no gradient: freeze what the loss does not use"
    # All in one long vector: every message costs time, even a short one.
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()  # the mean, not the sum
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def train_one_epoch(model, loader, optimizer, device, profiler):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
        profiler.step()  # one step ends here
    return torch.stack(losses)


def train(train_set, device, args):
    """Record a few steps on all ranks. Return the losses of the steps."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    # Five more, because the first steps allocate memory and connect the ranks.
    with profile(
        schedule=schedule(wait=0, warmup=5, active=args.max_steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(TRACES, f"rank{dist.get_rank()}"),
        acc_events=True,
    ) as profiler:
        batches = islice(loader, 5 + args.max_steps)
        losses = train_one_epoch(model, batches, optimizer, device, profiler)
    dist.all_reduce(losses)  # each rank knows only its own
    return losses / dist.get_world_size()


def main(device, args):
    """Run on every rank, as start (below) calls it: train, say where the time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's own messages
    train_set, _ = load_mnist()
    older = set(Path(TRACES).glob("*"))
    losses = train(train_set, device, args)
    hidden = report_shares(older)  # every rank takes part: not under the if
    if dist.get_rank() == 0:
        write_scalars(losses, args.batch_size * dist.get_world_size())
        claim = f"communication hidden by computing: {hidden:.0%} (limit 5%)"
        return prove(claim, hidden <= 0.05 and losses.isfinite().all())


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"
TRACES = "./log_ddp"
LOADING = "enumerate(DataLoader)"  # what the loader does, in a trace


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def find_work(events, begin, end):
    """Return a flag per microsecond for data, compute and communication: bool [3, N].

    Two kinds of work overlap where both flags are set.
    """
    # On a GPU we count when the GPU works, not when the CPU asks it to.
    on_gpu = any(event["cat"] == "kernel" for event in events)
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    copied = [event["ts"] + event["dur"] for event in copies]
    flags = torch.zeros(3, int(end - begin) + 1, dtype=torch.bool)
    data, compute, communication = flags
    for event in events:
        name, category = event["name"], event["cat"]
        first, last = event["ts"], event["ts"] + event["dur"]
        if category == "user_annotation" and name.startswith("gloo:"):
            # gloo sends from the CPU: a GPU's tensor only after it was copied there.
            first = min((t for t in copied if first < t < last), default=first)
            kind = communication
        elif category == "kernel" and "ccl" in name.lower():  # NCCL, RCCL, oneCCL
            kind = communication
        elif category == "user_annotation" and name.startswith(LOADING):
            kind = data
        elif category == ("kernel" if on_gpu else "cpu_op") and "c10d:" not in name:
            kind = compute  # c10d: asks for communication
        else:
            continue
        kind[max(0, int(first - begin)) : max(0, int(last - begin))] = True
    if on_gpu:
        data &= ~compute  # while the GPU computes, loading on the CPU costs nothing
    else:
        compute &= ~data
    return flags


def time_shares(trace):
    """Return the share of time, from 0 to 1, of each kind of work in a trace file."""
    events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event["ph"] == "X"]  # those that take time
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    data, compute, communication = find_work(events, begin, end)
    shares = {
        "data": data,
        "compute": compute,
        "communication": communication,
        "overlap": communication & compute,
        "idle": ~(data | compute | communication),
    }
    return {kind: part.float().mean().item() for kind, part in shares.items()}


def report_shares(older):
    """Print where the time of every rank went. Every rank must call this.

    Return the share of communication that computing hides, NaN if nothing was sent.
    older: what was in the folder before; traces of an earlier run do not count.
    """
    traces = set(Path(TRACES).glob(f"rank{dist.get_rank()}.*")) - older
    table = gather(time_shares(traces.pop()))
    if dist.get_rank() == 0:
        print("rank", *(f"{kind:>14}" for kind in table[0]))
        for rank, shares in enumerate(table):
            print(f"{rank:4}", *(f"{share:14.1%}" for share in shares.values()))
        print(f"See: python scripts/view_traces.py {TRACES}")
    communication = sum(shares["communication"] for shares in table)
    if communication == 0:  # a rank alone may have nothing to send
        return 0.0 if len(table) == 1 else math.nan
    return sum(shares["overlap"] for shares in table) / communication


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(FOLDER, purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


def load_mnist():
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    train_set = MNIST(DATA, train=True)
    test_set = MNIST(DATA, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


class Net(nn.Module):
    """A small convolutional network: uint8 [N, 28, 28] to logits, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = images.unsqueeze(1) / 255  # float32 [N, 1, 28, 28], from 0 to 1
        x = (x - 0.1307) / 0.3081  # mean 0, standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


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


def start(args, url=None):
    """Run as one rank: join the process group, call main, leave the group."""
    # LOCAL_RANK: which rank of this node it is. init_process_group needs to know where
    # all ranks meet: at the url or, under torchrun, where two more variables say.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, url, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def start_rank(rank, args, url):
    """Run as this rank of one node."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # they end it, with no traceback
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(start(args, f"{url}?rank={rank}&world_size={args.processes}"))


def launch(args):
    """Start the ranks on this machine, with the variables that torchrun would set."""
    copies = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE", "1")
    if copies != "1":
        sys.exit(f"mpirun has started this {copies} times: use torchrun instead")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    world_size = str(args.processes)
    os.environ.update(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    linux = sys.platform == "linux"
    loopback = "lo" if linux else "lo0"  # what ranks send stays on this machine
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    method = "fork" if linux else "spawn"
    with tempfile.TemporaryDirectory() as folder:  # no other user can open it
        given = (args, f"file://{folder}/ranks")  # a file in which they meet
        try:
            mp.start_processes(start_rank, given, args.processes, start_method=method)
        except mp.ProcessExitedException as error:
            sys.exit(str(error))  # a rank was killed, or has printed what is wrong
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for process in mp.active_children():
                process.kill()
                process.join()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("processes", nargs="?", type=int, help="how many (4)")
    add("--batch-size", type=int, default=64, help="per process (64)")
    add("--lr", type=float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, default=20, help="to record (20)")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    ranks = int(os.environ.get("WORLD_SIZE", args.processes or 4))
    if not 0 < ranks <= 1000 or args.processes not in (None, ranks):
        parser.error("processes must be 1 to 1000, or WORLD_SIZE, which torchrun sets")
    args.processes = ranks
    timeout = os.environ.get("DIST_TIMEOUT", "60")
    if not timeout.isdecimal() or not 0 < int(timeout) < 2**31:
        parser.error(f"DIST_TIMEOUT is {timeout}, not a number of seconds")
    if (5 + args.max_steps) * args.batch_size * args.processes > 60_000:
        parser.error("too few images to record: lower --batch-size or --max-steps")
    return args


if __name__ == "__main__":
    args = parse_args()
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        sys.exit(start(args))
    else:
        launch(args)
