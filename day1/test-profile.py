"""A small job with DistributedDataParallel and random numbers, for looking at a trace.

Builds on: 5_mnist_manual_ddp_profile.py
New here:  gradient bucket, overlap
Run:       python day1/test-profile.py [processes]
Look for:  => traces in ./log: 4; communication hidden by computing: 55%
Try next:  bucket_cap_mb=100: one bucket for all, and hardly anything is hidden.
"""

import argparse
import json
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not accelerator or accelerator.type == "mps":  # Apple's has no collectives
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    shared = local_world_size > count  # then through gloo: NCCL refuses two ranks on one GPU
    return device, "gloo" if shared else dist.get_default_backend_for_device(device)


class Net(nn.Sequential):
    """Four wide layers, so that the gradients are large: float32 [N, 512] to [N, 512]."""

    def __init__(self):
        super().__init__(*(nn.Linear(512, 512) for _ in range(4)))


def time_shares(trace):
    """Return the shares of the time, from 0 to 1, that a trace file shows for each kind of work."""
    try:
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    except json.JSONDecodeError:
        raise RuntimeError(f"{trace} is not whole. Is the disk full?") from None
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    work = "kernel" if any(e["cat"] == "kernel" for e in events) else "cpu_op"  # GPU or CPU
    # One flag per microsecond and kind: two kinds overlap where both flags are set.
    data, compute, communication = torch.zeros(3, int(end - begin) + 1, dtype=torch.bool)
    for e in events:
        busy = slice(max(0, int(e["ts"] - begin)), max(0, int(e["ts"] + e["dur"] - begin)))
        data[busy] |= e["name"] == "data"
        communication[busy] |= e["name"].startswith(("gloo:", "ncclDevKernel"))
        compute[busy] |= e["cat"] == work and not e["name"].startswith(("c10d:", "gloo:", "nccl"))
    shares = {"data": data, "compute": compute & ~data, "communication": communication}
    shares |= {"overlap": communication & compute, "idle": ~(data | compute | communication)}
    return {kind: flags.float().mean().item() for kind, flags in shares.items()}


def report(folder):
    """Print where the time of every rank went, and how else to look at the traces."""
    table = [None] * dist.get_world_size()
    newest = max(Path(folder).glob(f"rank{dist.get_rank()}.*"))
    dist.all_gather_object(table, time_shares(newest))
    if dist.get_rank() == 0:
        print("rank", *(f"{kind:>14}" for kind in table[0]))
        for rank, shares in enumerate(table):
            print(f"{rank:4}", *(f"{share:14.1%}" for share in shares.values()))
        hidden, total = (sum(row[kind] for row in table) for kind in ("overlap", "communication"))
        share = f"{hidden / max(total, 1e-9):.0%}"
        print(f"See: python scripts/view_traces.py {folder} or tensorboard --logdir={folder}")
        print(f"=> traces in {folder}: {len(table)}; communication hidden by computing: {share}")


def main(device):
    """Run on every rank: train on random numbers, record it, say where the time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides what the profiler says of itself
    # Buckets of 1 MB: the first one is sent while backward still computes the others.
    model = DistributedDataParallel(Net().to(device), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = schedule(wait=0, warmup=5, active=10, repeat=1)
    writer = tensorboard_trace_handler("./log", worker_name=f"rank{dist.get_rank()}")
    with profile(schedule=plan, on_trace_ready=writer, acc_events=True) as profiler:
        for _ in range(15):
            with record_function("data"):
                inputs, targets = torch.randn(2, 1024, 512, device=device)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            profiler.step()  # one step ends here
    report("./log")


def start(local_rank, *arguments):
    """Be one rank: join the process group, run main, leave the group."""
    if launcher := mp.parent_process():  # end with it, however it ends
        threading.Thread(target=lambda: launcher.join() or os._exit(1), daemon=True).start()
    os.environ.setdefault("RANK", str(local_rank))
    device, backend = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    gloo, wait = backend == "gloo", timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group(backend, timeout=wait, device_id=None if gloo else device)
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    main(device, *arguments)
    dist.barrier()  # leave together; a rank that fails never gets here and ends the job
    dist.destroy_process_group()


def launch(processes, *arguments):
    """Start the ranks on this machine, with the variables that torchrun or Slurm would set."""
    if "RANK" in os.environ:  # torchrun or Slurm has started this process as one of the ranks
        return start(int(os.environ["LOCAL_RANK"]), *arguments)
    # The ranks find each other through a small server here. Port 0: the system picks a free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 starts no server of its own
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    # Share the cores out: ranks that each want all of them slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every rank, with no traceback
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        mp.set_forkserver_preload(["torch", "torch._dynamo"])  # which every optimizer wants
    mp.start_processes(start, args=arguments, nprocs=processes, start_method="forkserver")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processes", nargs="?", type=int, default=4, help="how many (4)")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int) and value <= 0:
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes)
