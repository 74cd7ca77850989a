"""Without Slurm: nodes that are simulated on this machine, each with its own ranks."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace

from launcher import forks
from launcher.failures import FailureReport, as_a_shell, ending, forward, write_stderr
from launcher.gpus import find_gpus, share_gpus
from launcher.rank import threads, torchrun_command
from launcher.rendezvous import interface_variables, reserve_port
from processes import Job, end_on_signals

GRACE = 5  # seconds from SIGTERM to SIGKILL. What started the launcher waits longer


def simulate(options: Namespace) -> int:
    """Run a command on simulated nodes, or only say how; return the exit status."""
    nodes, each = options.local
    # Until this function returns. A torchrun opens the port itself.
    reserved = reserve_port() if options.torchrun else listen(os.environ.get("MASTER_PORT"))
    port = (options.torchrun and os.environ.get("MASTER_PORT")) or str(reserved.getsockname()[1])
    masks, on = share_gpus(find_gpus(), nodes, each)
    cpus = len(os.sched_getaffinity(0)) // (nodes * each)  # of a rank
    interface = interface_variables("lo")
    os.environ.update(interface, OMP_NUM_THREADS=threads(cpus, nodes * each))
    where = f"{nodes} simulated on {socket.gethostname()}"
    print(f"nodes: {where}, ranks on each: {each}, in all: {nodes * each}")
    print(f"rendezvous: 127.0.0.1:{port}, interface {interface['GLOO_SOCKET_IFNAME']}")
    python = os.environ.get("PYTHON", sys.executable)
    omp = os.environ["OMP_NUM_THREADS"]
    print(f"each rank: OMP_NUM_THREADS={omp} {python}, on {on}", flush=True)
    if options.dry_run:
        print(" ".join(map(shlex.quote, [python, "-u", *options.command])))
        return 0
    end_on_signals(signal.SIGINT)  # or each rank would be sent it, and print a traceback
    ranks = {}
    if options.torchrun:
        here = "127.0.0.1"
        for node in range(nodes):
            command = torchrun_command(options, node, nodes, each, here, here, port)
            ranks[f"torchrun on simulated node {node}"] = command, masks[node]
        return run_ranks(ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(WORLD_SIZE=str(nodes * each), LOCAL_WORLD_SIZE=str(each))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # or rank 0 would open a store itself
    command = [sys.executable, "-u", *options.command]
    for rank in range(nodes * each):
        node, local_rank = divmod(rank, each)
        own = {**masks[node], "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        ranks[f"rank {rank} on simulated node {node}"] = command, own
    return run_ranks(ranks, reserved)


def listen(port: str | None) -> socket.socket:
    """Return a socket to which only this machine can connect, at this port or any free one."""
    try:
        return socket.create_server(("127.0.0.1", int(port or 0)))
    except (OSError, OverflowError, ValueError) as error:
        todo = "With `unset MASTER_PORT` the launcher finds a free one."
        sys.exit(f"MASTER_PORT {port} cannot be used: {error}. {todo}")


def run_ranks(
    ranks: dict[str, tuple[list[str], dict[str, str]]],
    listener: socket.socket | None = None,
) -> int:
    """Run ranks, {name: (command, its own variables)}; when one fails, stop the others.

    Return the exit status. They meet in a store at the listener, if there is one.
    """
    report, pipe = FailureReport(), os.pipe()
    reader = threading.Thread(target=forward, args=(report, pipe[0]), daemon=True)
    reader.start()
    files = [listener.fileno()] if listener else []
    command = [sys.executable, "-u", forks.__file__, *files]
    streams = {"stdin": subprocess.PIPE, "stdout": None, "stderr": pipe[1]}
    with Job(command, grace=GRACE, pass_fds=files, **streams) as job:
        os.close(pipe[1])
        with job.process.stdin as stdin:
            stdin.write(json.dumps(ranks).encode())
        status = job.process.wait()
        if not status:  # otherwise the others are ended immediately
            job.wait()
        for left in job.left:
            write_stderr(f"Left behind by a rank, so killed: process {left}\n")
    reader.join(1)  # no longer: a process that nobody can find may hold the pipe
    if status < 0:
        write_stderr(f"The process that starts the ranks ended with {ending(status)}.\n")
    return report.report_cause() or as_a_shell(status)
