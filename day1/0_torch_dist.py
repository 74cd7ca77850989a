"""Lesson 0: several processes, one sum.

Builds on: nothing
New here:  rank, world size, all_reduce
Run:       python day1/0_torch_dist.py [processes]
Look for:  => every rank holds the sum 0+1+2+3 = 6
Try next:  replace SUM by MAX or PRODUCT; run it with 1, 2 and 8 processes.
"""

import argparse
import os
import signal
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A collective waits for every rank. When one never comes, the others give up after this time.
TIMEOUT = timedelta(seconds=60)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main():
    """Run on every rank: the same code, told apart only by the rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    value = torch.tensor(float(rank))
    before = value.item()
    # Every rank gives its value, every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Lines printed by several processes come in any order, so rank 0 collects and prints them.
    rows = gather((before, value.item(), os.getpid()))
    if rank == 0:
        for r, (before, after, pid) in enumerate(rows):
            print(f"rank {r} of {world_size} (process {pid}): {before:g} before, {after:g} after")
        terms, expected = "+".join(map(str, range(world_size))), sum(range(world_size))
        if all(after == expected for _, after, _ in rows):
            print(f"=> every rank holds the sum {terms} = {expected}")
        else:
            print(f"=> WRONG: not every rank holds the sum {terms} = {expected}")


def start(local_rank, *arguments):
    """Be one rank: join the process group, run main, and leave the group on every way out."""
    os.environ.setdefault("RANK", str(local_rank))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        main(*arguments)
    finally:
        dist.destroy_process_group()


def launch(processes, *arguments):
    """Start the processes on this machine, with the variables that torchrun or Slurm would set."""
    if "RANK" in os.environ:  # torchrun or Slurm has started the processes: this is one of them
        return start(int(os.environ["LOCAL_RANK"]), *arguments)
    # The ranks find each other through a small server here. Port 0: the system picks a free one.
    address, port = (listener := socket.create_server(("127.0.0.1", 0))).getsockname()
    options = dict(master_listen_fd=listener.detach(), wait_for_workers=False, use_libuv=False)
    store = dist.TCPStore(address, port, is_master=True, **options)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(store.port))
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # so rank 0 starts no server of its own
    # Divide the cores: processes that each take all of them would only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all at once, without tracebacks
    try:
        mp.spawn(start, args=arguments, nprocs=processes)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"Rank {error.error_index} failed: {error.msg.strip()}")


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processes", nargs="?", type=int, default=4, help="processes to start (4)")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"processes must be 1 or more, not {args.processes}")
    return args


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes)
