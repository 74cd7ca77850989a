"""Without Slurm: nodes that are simulated on this machine, each with its own ranks."""

import os
import queue
import shlex
import signal
import socket
import sys
import threading
import time

from launcher.failures import NO_FAILURE, FailureReport, as_a_shell, ending, forward, write_stderr
from launcher.gpus import find_gpus, share_gpus
from launcher.monitor import watched
from launcher.rank import rank_command, threads
from launcher.rendezvous import interface_variables, reserve_port
from processes import Group, end_on_signals

GRACE = 5  # seconds from SIGTERM to SIGKILL. What started the launcher waits longer
LAST_WORDS = 1.5  # seconds in which the others usually end by themselves, and may say why


def run(options):
    """Run a command on simulated nodes, or only say how; return the exit status."""
    nodes, each = options.local
    # Until this function returns. A torchrun opens the port itself.
    reserved = reserve_port() if options.torchrun else listen(os.environ.get("MASTER_PORT"))
    port = (options.torchrun and os.environ.get("MASTER_PORT")) or str(reserved.getsockname()[1])
    masks, on = share_gpus(find_gpus(), nodes, each)
    common = interface_variables("lo")
    cpus = len(os.sched_getaffinity(0)) // (nodes * each)  # of a rank
    common["OMP_NUM_THREADS"] = threads(cpus, nodes * each)
    where = f"{nodes} simulated on {socket.gethostname()}"
    print(f"nodes: {where}, ranks on each: {each}, in all: {nodes * each}")
    print(f"rendezvous: 127.0.0.1:{port}, interface {common['GLOO_SOCKET_IFNAME']}")
    python = os.environ.get("PYTHON", sys.executable)
    print(f"each rank: OMP_NUM_THREADS={common['OMP_NUM_THREADS']} {python}, on {on}", flush=True)
    if options.dry_run:
        print(" ".join(map(shlex.quote, [python, "-u", *options.command])))
        return 0
    tasks = 1 if options.torchrun else each  # on each node
    common.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANKS_PER_NODE=str(each))
    common.update(WORLD_SIZE=str(nodes * tasks), LOCAL_WORLD_SIZE=str(tasks))
    if not options.torchrun:
        common["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # or rank 0 would open one for everybody
    ranks = {}
    for rank in range(nodes * tasks):
        node = rank // tasks
        variables = {**common, **masks[node], "RANK": str(rank), "LOCAL_RANK": str(rank % tasks)}
        who = "torchrun" if options.torchrun else f"rank {rank}"
        ranks[f"{who} on simulated node {node}"] = rank_command(options, variables, "127.0.0.1")
    names = [f"local-{port}-simulated-node-{node}" for node in range(nodes)]
    end_on_signals(signal.SIGINT)  # or each rank would be sent it, and print a traceback
    with watched(names if options.monitor else []), Group(GRACE) as group:
        return run_ranks(ranks, group, None if options.torchrun else reserved)


def listen(port):
    """Return a socket to which only this machine can connect, at this port or any free one."""
    try:
        return socket.create_server(("127.0.0.1", int(port or 0)))
    except (OSError, OverflowError, ValueError) as error:
        todo = "With `unset MASTER_PORT` the launcher finds a free one."
        sys.exit(f"MASTER_PORT {port} cannot be used: {error}. {todo}")


def open_store(listener):
    """Return the store in which the ranks meet, at a listening socket.

    A rank would open it on all addresses of the machine, where everybody on its network could join.
    """
    from torch.distributed import TCPStore  # here: the ranks need seconds for that, too

    host, port = listener.getsockname()
    at = {"use_libuv": False, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, is_master=True, **at)


def run_ranks(ranks, group, listener):
    """Run ranks on this machine; when one fails, stop the others. Return the exit status.

    ranks      the command and the environment of each, {name: (command, environment)}
    group      the processes.Group that they are to belong to
    listener   a socket for the store in which they meet, or None
    """
    report, ended = FailureReport(), queue.SimpleQueue()

    def note_end(name, process):
        ended.put((name, process.wait()))

    ours, theirs = os.pipe()
    reader = threading.Thread(target=forward, args=(report, ours), daemon=True)
    reader.start()
    try:
        for name, (command, environment) in ranks.items():
            process = group.start(command, env=environment, stderr=theirs)
            # A thread waits for each of them, so their ends come in the right order.
            threading.Thread(target=note_end, args=(name, process), daemon=True).start()
        os.close(theirs)
        store = open_store(listener) if listener else None
        status = wait_for_all(list(ranks), ended, report)
        del store  # it was there for as long as they ran
        if not status:
            for process in group.settle():
                write_stderr(f"Left behind by a rank, so killed: process {process}\n")
    finally:
        group.end()
        reader.join(1)  # no longer: a process that nobody can find may hold the pipe
    return report.report_cause() or as_a_shell(status)


def wait_for_all(running, ended, report):
    """Wait until all ranks have ended or one has failed, and tell. Return its status, or 0."""
    status = 0
    while running and not status:
        name, status = ended.get()
        running.remove(name)
    if not status:
        return 0
    report.failures.append((time.time(), f"{name} ended with {ending(status)}"))
    time.sleep(LAST_WORDS)
    while not ended.empty():
        running.remove(ended.get()[0])
    for name in running if status not in NO_FAILURE else []:  # it hangs, or is busy
        write_stderr(f"Still running: {name}.\n")
    return status
