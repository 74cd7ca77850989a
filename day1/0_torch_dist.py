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
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
        correct = all(after == expected for _, after, _ in rows)
        verdict = "every rank holds" if correct else "WRONG: not every rank holds"
        print(f"=> {verdict} the sum {terms} = {expected}")


def start(local_rank, *arguments):
    """Be one rank: join the process group, run main, leave the group."""
    if launcher := mp.parent_process():  # end with it, however it ends
        threading.Thread(target=lambda: launcher.join() or os._exit(1), daemon=True).start()
    os.environ.setdefault("RANK", str(local_rank))
    wait = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))  # at most, in a collective
    dist.init_process_group("gloo", timeout=wait)
    main(*arguments)
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
