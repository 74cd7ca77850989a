"""A small job with DistributedDataParallel and random numbers, for looking at a trace.

Builds on: 5_mnist_manual_ddp_profile.py
New here:  gradient bucket, overlap
Run:       python day1/test-profile.py [processes]
Look for:  => traces in ./log: 4; communication hidden by computing: ... (...): ok
Try next:  bucket_cap_mb=100: one bucket for all, and hardly anything is hidden.
"""

import argparse
import json
import math
import os
import signal
import socket
import sys
import threading
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

FOLDER = "./log"
DATA = "random numbers"  # the part of a step that makes them, in a trace


class Net(nn.Sequential):
    """Four wide layers with large gradients: float32 [N, 512] to float32 [N, 512]."""

    def __init__(self):
        super().__init__(*(nn.Linear(512, 512) for _ in range(4)))


def main(device):
    """Run on every rank: train on random numbers, say where the time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's own messages
    older = set(Path(FOLDER).glob("*"))
    model = Net().to(device)
    # Buckets of 1 MB: the first one is sent while backward still computes the others.
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Five more, because the first steps allocate memory and connect the ranks.
    plan = schedule(wait=0, warmup=5, active=10, repeat=1)
    writer = tensorboard_trace_handler(FOLDER, worker_name=f"rank{dist.get_rank()}")
    with profile(schedule=plan, on_trace_ready=writer, acc_events=True) as profiler:
        for _ in range(15):
            with record_function(DATA):
                inputs, targets = torch.randn(2, 1024, 512, device=device)
            optimizer.zero_grad()
            loss = F.mse_loss(ddp_model(inputs), targets)
            loss.backward()
            optimizer.step()
            profiler.step()  # one step ends here
    hidden, claim = report_shares(FOLDER, older)
    if dist.get_rank() == 0:
        claim += " (a measurement: no limit)"
        return prove(claim, hidden >= 0)  # NaN is not: nothing was sent


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def time_shares(trace):
    """Return the share of time, from 0 to 1, of each kind of work in a trace file."""
    try:
        events = json.loads(trace.read_text())["traceEvents"]
    except json.JSONDecodeError:
        raise RuntimeError(f"{trace} is not whole. Is the disk full?") from None
    events = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    # On a GPU we count when the GPU works, not when the CPU asks it to.
    categories = {event["cat"] for event in events}
    work = "kernel" if "kernel" in categories else "cpu_op"
    marks = {event["cat"] for event in events if event["name"].startswith(DATA)}
    on_gpu = "gpu_user_annotation" in marks
    mark = "gpu_user_annotation" if on_gpu else "user_annotation"
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    copied = sorted(event["ts"] + event["dur"] for event in copies)
    # One flag per microsecond and kind: two kinds overlap where both flags are set.
    flags = torch.zeros(3, int(end - begin) + 1, dtype=torch.bool)
    data, compute, communication = flags
    for event in events:
        name, category = event["name"], event["cat"]
        first, last = event["ts"], event["ts"] + event["dur"]
        sends = category == "kernel" and "ccl" in name.lower()  # NCCL, RCCL, oneCCL
        if category == "user_annotation" and name.startswith("gloo:"):
            # gloo sends from the CPU: a GPU's tensor only after it was copied there.
            first = next((done for done in copied if first < done < last), first)
            sends = True
        busy = slice(max(0, int(first - begin)), max(0, int(last - begin)))
        data[busy] |= category == mark and name.startswith(DATA)
        communication[busy] |= sends
        asks = name.startswith("c10d:")  # for communication
        compute[busy] |= category == work and not sends and not asks
    if work == "kernel" and not on_gpu:
        data &= ~compute  # while the GPU computes, loading on the CPU costs nothing
    else:
        compute &= ~data
    shares = {
        "data": data,
        "compute": compute,
        "communication": communication,
        "overlap": communication & compute,
        "idle": ~(data | compute | communication),
    }
    return {kind: part.float().mean().item() for kind, part in shares.items()}


def report_shares(folder, older):
    """Print where the time of every rank went. Every rank must call this.

    older: what was in the folder before. Traces of an earlier run do not count.
    Return the share of communication that computing hides, NaN if a rank of several
    has none; and the same as a text.
    """
    traces = set(Path(folder).glob(f"rank{dist.get_rank()}.*")) - older
    if not traces:
        raise RuntimeError(f"No trace was written to {folder}. Is the disk full?")
    table = gather(time_shares(traces.pop()))
    overlap = sum(shares["overlap"] for shares in table)
    communication = [shares["communication"] for shares in table]
    hidden = 0.0
    if len(table) > 1:  # a rank alone may have nothing to send
        hidden = overlap / sum(communication) if all(communication) else math.nan
    if dist.get_rank() == 0:
        print("rank", *(f"{kind:>14}" for kind in table[0]))
        for rank, shares in enumerate(table):
            print(f"{rank:4}", *(f"{share:14.1%}" for share in shares.values()))
        viewer = f"python scripts/view_traces.py {folder}"
        print(f"See: {viewer} or tensorboard --logdir={folder}")
    traces = f"traces in {folder}: {len(table)}"
    return hidden, f"{traces}; communication hidden by computing: {hidden:.0%}"


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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


def end_with_launcher():
    """End this rank as soon as the launcher has ended, even if by kill -9."""
    mp.parent_process().join()
    os._exit(1)


def start_rank(rank, *arguments):
    """Run as this rank, a number that start_processes gives: set variables, start."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    threading.Thread(target=end_with_launcher, daemon=True).start()
    start(*arguments)


def launch(processes, *arguments):
    """Start the ranks on this machine, with the variables that torchrun would set."""
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        ranks = int(os.environ["WORLD_SIZE"])
        if processes != ranks:
            problem = f"torchrun has started {ranks} processes, not {processes}"
            sys.exit(f"{problem}. Leave the number out.")
        start(*arguments)
        return
    # Reserve a free port. Rank 0 will listen there, and the others connect to it.
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))  # 0: the system chooses one
        address, port = keeper.getsockname()
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        # Divide the cores: ranks that each want all of them slow each other down.
        threads = max(1, torch.get_num_threads() // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # Ctrl-C ends every rank, with no traceback, unless the shell has it ignored.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":  # import once, not once per rank; not safe on a Mac
            mp.set_forkserver_preload(["torch", "torch._dynamo", "torchvision"])
        try:
            mp.start_processes(
                start_rank, arguments, processes, start_method="forkserver"
            )
        except mp.ProcessExitedException as error:
            sys.exit(str(error))  # a rank was killed, or has said what is wrong itself


def positive_int(text):
    """Return an argument as a whole number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        problem = f"must be a whole number greater than 0, not {text}"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    ranks = int(os.environ.get("WORLD_SIZE", 4))  # torchrun sets it
    add("processes", nargs="?", type=positive_int, default=ranks, help="how many (4)")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes)
