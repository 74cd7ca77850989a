"""A small job with DistributedDataParallel and random numbers, for looking at a trace.

Builds on: 5_mnist_manual_ddp_profile.py
New here:  gradient bucket, overlap
Run:       python day1/test-profile.py [processes]
Look for:  => communication hidden by computing: ... (no limit): ok
Try next:  --bucket-mb 100: one bucket for all, and hardly anything is hidden.
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
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler


class Net(nn.Sequential):
    """Four wide layers with large gradients: float32 [N, 512] to float32 [N, 512]."""

    def __init__(self):
        layers = [nn.Linear(512, 512) for _ in range(4)]
        super().__init__(*layers)


def train(device, args):
    """Record a few steps on all ranks, on random numbers."""
    model = Net().to(device)
    # Buckets of 1 MB: the first one is sent while backward still computes the others.
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Five more, because the first steps allocate memory and connect the ranks.
    with profile(
        schedule=schedule(wait=0, warmup=5, active=10, repeat=1),
        on_trace_ready=tensorboard_trace_handler(TRACES, f"rank{dist.get_rank()}"),
        acc_events=True,
    ) as profiler:
        for _ in range(15):
            with record_function(LOADING):
                inputs = torch.randn(1024, 512, device=device)
                targets = torch.randn(1024, 512, device=device)
            optimizer.zero_grad()
            loss = F.mse_loss(ddp_model(inputs), targets)
            loss.backward()
            optimizer.step()
            profiler.step()  # one step ends here


def main(device, args):
    """Run on every rank, as start (below) calls it: train, say where the time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's own messages
    older = set(Path(TRACES).glob("*"))
    train(device, args)
    hidden = report_shares(older)  # every rank takes part: not under the if
    if dist.get_rank() == 0:
        claim = f"communication hidden by computing: {hidden:.0%} (no limit)"
        return prove(claim, hidden >= 0)  # NaN is not: nothing was sent


# ---- Shared helpers, identical in every lesson

TRACES = "./log"
LOADING = "random numbers"  # the part of a step that makes them, in a trace


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
    add("--bucket-mb", type=int, default=1, help="size of a bucket (1)")
    args = parser.parse_args()
    if not 0 < args.bucket_mb < 2**31:
        parser.error("bucket-mb must be at least 1")
    ranks = int(os.environ.get("WORLD_SIZE", args.processes or 4))
    if not 0 < ranks <= 1000 or args.processes not in (None, ranks):
        parser.error("processes must be 1 to 1000, or WORLD_SIZE, which torchrun sets")
    args.processes = ranks
    timeout = os.environ.get("DIST_TIMEOUT", "60")
    if not timeout.isdecimal() or not 0 < int(timeout) < 2**31:
        parser.error(f"DIST_TIMEOUT is {timeout}, not a number of seconds")
    return args


if __name__ == "__main__":
    args = parse_args()
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        sys.exit(start(args))
    else:
        launch(args)
