"""Without Slurm: nodes that are simulated on this machine, each with its own ranks."""

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace

from launcher import forks
from launcher.failures import NO_FAILURE, FailureReport, as_a_shell, ending, forward, write_stderr
from launcher.gpus import find_gpus, share_gpus
from launcher.monitor import watched
from launcher.rank import threads, torchrun_command
from launcher.rendezvous import interface_variables, reserve_port
from processes import Group, end_on_signals

GRACE = 5  # seconds from SIGTERM to SIGKILL. What started the launcher waits longer
LAST_WORDS = 1.5  # seconds in which the others usually end by themselves, and may say why


def run(options: Namespace) -> int:
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
    logs = [f"local-{port}-simulated-node-{node}" for node in range(nodes)]
    end_on_signals(signal.SIGINT)  # or each rank would be sent it, and print a traceback
    with watched(logs if options.monitor else []), Group(GRACE) as group:
        if options.torchrun:
            commands = {
                f"torchrun on simulated node {node}": (
                    torchrun_command(options, node, nodes, each, "127.0.0.1", "127.0.0.1", port),
                    masks[node],
                )
                for node in range(nodes)
            }
            return run_ranks(commands, group)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update(WORLD_SIZE=str(nodes * each), LOCAL_WORLD_SIZE=str(each))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # or rank 0 would open a store itself
        commands = {
            f"rank {rank} on simulated node {rank // each}": (
                [sys.executable, "-u", *options.command],
                {**masks[rank // each], "RANK": str(rank), "LOCAL_RANK": str(rank % each)},
            )
            for rank in range(nodes * each)
        }
        return run_ranks(commands, group, reserved)


def listen(port: str | None) -> socket.socket:
    """Return a socket to which only this machine can connect, at this port or any free one."""
    try:
        return socket.create_server(("127.0.0.1", int(port or 0)))
    except (OSError, OverflowError, ValueError) as error:
        todo = "With `unset MASTER_PORT` the launcher finds a free one."
        sys.exit(f"MASTER_PORT {port} cannot be used: {error}. {todo}")


def run_ranks(
    ranks: dict[str, tuple[list[str], dict[str, str]]],
    group: Group,
    listener: socket.socket | None = None,
) -> int:
    """Run ranks on this machine; when one fails, stop the others. Return the exit status.

    ranks      the command of each, and its own variables, {name: (command, variables)}
    group      the processes.Group that they are to belong to
    listener   a socket for the store in which they meet, or None
    """
    report, ended = FailureReport(), queue.SimpleQueue()
    errors, ends = os.pipe(), os.pipe()
    readers = [
        threading.Thread(target=forward, args=(report, errors[0]), daemon=True),
        threading.Thread(target=note_ends, args=(ends[0], list(ranks), ended), daemon=True),
    ]
    files = [ends[1], *([listener.fileno()] if listener else [])]
    command = [sys.executable, "-u", forks.__file__, *files]
    try:
        for reader in readers:
            reader.start()
        options = {"stdin": subprocess.PIPE, "stderr": errors[1], "pass_fds": files}
        with group.start(command, **options).stdin as stdin:
            stdin.write(json.dumps(list(ranks.values())).encode())
        os.close(errors[1])
        os.close(ends[1])
        status = wait_for_all(list(ranks), ended, report)
        if not status:
            for process in group.settle():
                write_stderr(f"Left behind by a rank, so killed: process {process}\n")
    finally:
        group.end()
        readers[0].join(1)  # no longer: a process that nobody can find may hold the pipe
    return report.report_cause() or as_a_shell(status)


def note_ends(pipe: int, names: list[str], ended: queue.SimpleQueue) -> None:
    """Put (name, status) into a queue for each rank that has ended, in the order of their ends."""
    with open(pipe) as lines:
        for line in lines:
            number, status = map(int, line.split())
            ended.put((names[number], status))
    ended.put(("The process that starts the ranks", -signal.SIGKILL))  # or all ranks have ended


def wait_for_all(running: list[str], ended: queue.SimpleQueue, report: FailureReport) -> int:
    """Wait until all ranks have ended or one has failed, and tell. Return its status, or 0."""
    status = 0
    while running and not status:
        name, status = ended.get()
        running = [rank for rank in running if rank != name]
    if not status:
        return 0
    report.failures.append((time.time(), f"{name} ended with {ending(status)}"))
    time.sleep(LAST_WORDS)
    while not ended.empty():
        name, _ = ended.get()
        running = [rank for rank in running if rank != name]
    for name in running if status not in NO_FAILURE else []:  # it hangs, or is busy
        write_stderr(f"Still running: {name}.\n")
    return status
