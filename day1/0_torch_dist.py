"""Lesson 0: several processes, one sum.

Builds on: nothing
New here:  rank, world size, all_reduce
Run:       python day1/0_torch_dist.py [processes]
Look for:  => every rank holds ...; the sum 0+1+2+3 is ...: ok
Try next:  replace SUM by MAX or PRODUCT; run it with 1, 2 and 8 processes.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main():
    """Run on every rank: the same code, told apart only by the rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    value = torch.tensor(float(rank))
    before = value.item()
    # Every rank gives its value, and every rank gets the sum of all. It works in place.
    dist.all_reduce(value, op=dist.ReduceOp.SUM)

    # Lines printed by several processes come in any order: rank 0 collects and prints.
    rows = gather((before, value.item(), os.getpid()))
    if rank == 0:
        for r, (before, after, pid) in enumerate(rows):
            who = f"rank {r} of {world_size} (process {pid})"
            print(f"{who}: {before:g} before, {after:g} after")
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


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start(*arguments):
    """Run as one rank: join the process group, call main, leave the group."""
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group("gloo", timeout=timeout)
    status = main(*arguments)
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
