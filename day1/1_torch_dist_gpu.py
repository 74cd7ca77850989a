"""Lesson 1: the same sum on accelerators, and how fast it is.

Builds on: 0_torch_dist.py
New here:  device, backend (NCCL, gloo), bus bandwidth
Run:       python day1/1_torch_dist_gpu.py [processes]
Look for:  => every rank holds the sum 0+1+2+3 = 6
Try next:  run it with 2 and with 8 processes; compare the time of 4 kB with that of 1 MB.
"""

import argparse
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = {"4 kB": 1_000, "1 MB": 250_000, "64 MB": 16_000_000}  # numbers of 4 bytes each


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


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def time_all_reduce(numbers, device, repeats=10):
    """Return the seconds that one all_reduce of this many float32 numbers takes."""
    tensor = torch.ones(numbers, device=device)
    dist.all_reduce(tensor)  # the first call sets up connections: not timed
    torch.get_device_module(device).synchronize()  # torch.cpu's does nothing
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    # A GPU only notes what to do and works on: without this the clock is read too early.
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) / repeats


def main(device):
    """Run on every rank: the same code, told apart only by the rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    value = torch.tensor(float(rank), device=device)
    before = value.item()
    # Every rank gives its value, every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Lines printed by several processes come in any order, so rank 0 collects and prints them.
    rows = gather((before, value.item(), str(device)))
    if rank == 0:
        for r, (before, after, name) in enumerate(rows):
            print(f"rank {r} of {world_size} on {name}: {before:g} before, {after:g} after")
        terms, expected = "+".join(map(str, range(world_size))), sum(range(world_size))
        correct = all(after == expected for _, after, _ in rows)

    # Algorithm bandwidth: size / time. Bus bandwidth: what each rank's link carries, 2 (n - 1) / n
    # times as much, because in a ring nearly every number passes every link twice. Source:
    # NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    for size, numbers in SIZES.items():
        seconds = max(gather(time_all_reduce(numbers, device)))
        algorithm = numbers * 4 / seconds / 1e6
        bus = algorithm * 2 * (world_size - 1) / world_size
        if rank == 0:
            print(
                f"{size:>5}: {seconds * 1e3:8.3f} ms, {algorithm:9,.1f} MB/s, bus {bus:9,.1f} MB/s"
            )
    if rank == 0:
        verdict = "every rank holds" if correct else "WRONG: not every rank holds"
        print(f"=> {verdict} the sum {terms} = {expected}")


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
        mp.set_forkserver_preload(["torch"])
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
