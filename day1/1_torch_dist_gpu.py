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
import socket
import statistics
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = {"4 kB": 1_000, "1 MB": 250_000, "64 MB": 16_000_000}  # numbers of 4 bytes each


def time_all_reduce(numbers, device):
    """Return the seconds that one all_reduce of float32 numbers took, 5 times."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor)  # the first call sets up connections: not timed
    seconds = []
    for _ in range(5):
        torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(4):
            dist.all_reduce(tensor)
        # The calls return before a GPU has done the work. Wait, then read the clock.
        torch.get_device_module(device).synchronize()
        seconds.append((time.perf_counter() - begin) / 4)
    return seconds


def main(device):
    """Run on every rank: the same code, told apart only by the rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    value = torch.tensor(float(rank), device=device)
    before = value.item()
    # Every rank gives its value, and every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Lines printed by several processes come in any order: rank 0 collects and prints.
    rows = gather((before, value.item(), str(device)))
    if rank == 0:
        for r, (before, after, name) in enumerate(rows):
            who = f"rank {r} of {world_size} on {name}"
            print(f"{who}: {before:g} before, {after:g} after")

    for size, numbers in SIZES.items():
        rounds = slowest_rank(time_all_reduce(numbers, device))
        seconds = statistics.median(rounds)
        # Algorithm bandwidth: size / time. Bus bandwidth: what a rank's link carries.
        # In a ring of n ranks nearly every number passes every link twice, exactly
        # 2 (n - 1) / n times. Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
        algorithm = numbers * 4 / seconds / 1e6
        bus = algorithm * 2 * (world_size - 1) / world_size
        if rank == 0:
            speeds = f"{algorithm:7,.1f} MB/s (bus {bus:7,.1f})"
            print(f"{size:>5}: {milliseconds(rounds)}, {speeds}")
    if rank == 0:
        sums = [after for _, after, _ in rows]
        return prove(*check_sums(sums))


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def check_sums(sums):
    """Return what the ranks hold, and what they should, as a text; and if it is right.

    sums: the values of all ranks, in rank order.
    """
    expected = sum(range(len(sums)))
    terms = "+".join(str(rank) for rank in range(len(sums)))
    held = ", ".join(f"{value:g}" for value in sorted(set(sums)))
    correct = all(value == expected for value in sums)
    return f"every rank holds {held}; the sum {terms} is {expected}", correct


def slowest_rank(seconds):
    """Return for each round the time of its slowest rank. Every rank must call this."""
    return [max(times) for times in zip(*gather(seconds), strict=True)]


def milliseconds(rounds):
    """Return the median of times in seconds, with the lowest and the highest."""
    median = statistics.median(rounds) * 1e3
    return f"{median:7.3f} ms ({min(rounds) * 1e3:.2f}-{max(rounds) * 1e3:.2f})"


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
            mp.set_forkserver_preload(["torch"])
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
