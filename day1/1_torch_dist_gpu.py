"""Lesson 1: the same sum on accelerators, and how fast it is.

Builds on: 0_torch_dist.py
New here:  device, backend (NCCL, gloo), bus bandwidth
Run:       python day1/1_torch_dist_gpu.py [processes]
Look for:  => every rank holds ...; the sum 0+1+2+3 is ...: ok
Try next:  run it with 2 and with 8 processes; compare the times of 4 kB and 1 MB.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = {"4 kB": 1_000, "1 MB": 250_000, "64 MB": 16_000_000}  # numbers of 4 bytes each


def time_all_reduce(numbers, device, rounds):
    """Return the seconds that one all_reduce of float32 numbers took, in each round."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor)  # the first call sets up connections: not timed
    seconds = []
    for _ in range(rounds):
        torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(4):
            dist.all_reduce(tensor)
        # The calls return before a GPU has done the work. Wait, then read the clock.
        torch.get_device_module(device).synchronize()
        seconds.append((time.perf_counter() - begin) / 4)
    return seconds


def main(device, args):
    """Run on every rank: the same code, told apart only by the rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    value = torch.tensor(float(rank), device=device)
    # Every rank gives its value, and every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    # Lines of several processes arrive in any order, so rank 0 collects and prints.
    rows = gather((str(device), value.item()))
    if rank == 0:
        for r, (place, after) in enumerate(rows):
            print(f"rank {r} of {world_size} on {place}: {r} before, {after:g} after")

    for size, numbers in SIZES.items():
        seconds = time_all_reduce(numbers, device, args.rounds)
        if rank == 0:
            print(f"{size:>5}: {describe(seconds, numbers, world_size)}")
    if rank == 0:
        return prove(*check_sums([after for _, after in rows]))


# ---- Shared helpers, identical in every lesson


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def check_sums(sums):
    """Return in words what the ranks hold and should hold, and whether it is right."""
    expected = sum(range(len(sums)))
    terms = "+".join(str(rank) for rank in range(len(sums)))
    held = ", ".join(f"{value:g}" for value in sorted(set(sums)))
    correct = all(value == expected for value in sums)
    return f"every rank holds {held}; the sum {terms} is {expected}", correct


def describe(seconds, numbers, ranks):
    """Return the median time of an all_reduce and its bandwidths, as a text."""
    median = statistics.median(seconds)
    # Algorithm bandwidth: size / time. Bus bandwidth: what a rank's link carries. In a
    # ring of n ranks nearly every number passes every link twice, exactly 2 (n - 1) / n
    # times. Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    algorithm = numbers * 4 / median / 1e6
    bus = algorithm * 2 * (ranks - 1) / ranks
    spread = f"{min(seconds) * 1e3:.2f}-{max(seconds) * 1e3:.2f}"
    bandwidths = f"{algorithm:7,.1f} MB/s (bus {bus:7,.1f})"
    return f"{median * 1e3:7.3f} ms ({spread}), {bandwidths}"


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
    add("--rounds", type=int, default=5, help="to measure each size (5)")
    args = parser.parse_args()
    if not 0 < args.rounds < 2**31:
        parser.error("rounds must be at least 1")
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
