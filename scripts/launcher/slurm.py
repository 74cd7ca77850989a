"""Inside a Slurm allocation: ask the nodes, say what was chosen, start srun and see how it ends."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

from launcher.failures import FailureReport, as_a_shell, forward, write_stderr
from launcher.rank import start_and_forward_signals
from launcher.rendezvous import address_and_interface, reserve_port
from launcher.srun_options import choose_ranks, count_gpus, for_srun, options_of

SCRIPT = Path(__file__).resolve().parents[1] / "multinode_setup_and_run.sh"


def run_on_nodes(options: Namespace) -> int:
    """Run a command on all nodes of the job, or only say how; return the exit status."""
    nodes = nodes_of_job()
    found = probe_first_node(nodes[0])
    ranks = choose_ranks([found["ranks"]] * len(nodes), os.environ)
    cpus, srun = options_of(nodes, ranks, options.torchrun, os.environ)
    address = os.environ.get("MASTER_ADDR") or found["address"]
    port = os.environ.get("MASTER_PORT") or str(found["port"])
    interface = found["interface"] or "-"
    each = " ".join(map(str, ranks if len(set(ranks)) > 1 else ranks[:1]))
    by = "torchrun" if options.torchrun else "srun"
    print(f"nodes: {' '.join(nodes)}, ranks on each: {each}, in all: {sum(ranks)}")
    print(f"rendezvous: {address}:{port}, interface {interface}")
    has = f"{cpus or 'less than 1'} CPUs"
    print(f"each rank: {has}, {os.environ['PYTHON']}, started by {by}", flush=True)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    os.environ["RANKS_PER_NODE"] = " ".join(map(str, ranks))
    command = ["srun", *srun, str(SCRIPT), "--as-task", *sys.argv[1:]]
    if options.dry_run:
        print(" ".join(map(shlex.quote, command)))
        return 0
    return supervise(command)


def nodes_of_job() -> list[str]:
    """Return the names of the job's nodes. Exit if they could not meet."""
    job = os.environ["SLURM_JOB_ID"]
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"):
        if name not in os.environ:
            words = "so this is no shell of a job. Get one with salloc, or: unset SLURM_JOB_ID"
            sys.exit(f"SLURM_JOB_ID is {job}, but {name} is not set, {words}")
    show = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    try:
        nodes = subprocess.check_output(show).decode().split()
    except FileNotFoundError:
        words = "If PYTHON starts a container, you also need a python3 outside of it."
        sys.exit(f"{sys.executable} finds no scontrol. {words}")
    address = os.environ.get("MASTER_ADDR", "")
    if len(nodes) > 1 and address.startswith(("127.", "localhost")):
        words = "where each node finds only itself: unset MASTER_ADDR"
        sys.exit(f"MASTER_ADDR is {address}, {words}")
    return nodes


def probe_first_node(node: str) -> dict:
    """Return what print_probe() says: only the first node knows which of its ports is free.

    The others have as many GPUs.
    """
    options = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap"]
    command = ["srun", "--export=ALL", *options, str(SCRIPT), "--as-probe"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=for_srun(os.environ))
    answer = re.search("^probe: (.*)$", done.stdout.decode(errors="replace"), re.M)
    if done.returncode or not answer:
        sys.exit(f"The first node, {node}, could not be asked for a free port: see above.")
    return json.loads(answer[1])


def print_probe() -> None:
    """On a node: print for how many ranks it has GPUs, and where ranks could meet."""
    leads_to = os.environ.get("MASTER_ADDR")
    address, interface = address_and_interface(os.environ["SLURMD_NODENAME"], leads_to)
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
    found = {"address": address, "interface": interface, "port": port}
    print("probe:", json.dumps(found | {"ranks": count_gpus(os.environ) or 1}), flush=True)


def supervise(command: list[str]) -> int:
    """Run srun, pass on what it says on stderr, and say which rank failed first. Return its status.

    An srun that has told of a failure, and then says nothing for a while, is killed.
    """
    ends = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]
    pipes = {"env": for_srun(os.environ), "stderr": subprocess.PIPE}
    srun, _ = start_and_forward_signals(command, ends, **pipes)

    def give_up():
        srun.kill()
        lost = "see the one with a * in sinfo -N. srun still waited for it."
        write_stderr(f"A node does not answer: {lost}\n")

    report = FailureReport()
    arguments = (report, srun.stderr.fileno(), give_up)
    reader = threading.Thread(target=forward, args=arguments, daemon=True)
    reader.start()
    srun.wait()
    reader.join(5)  # no longer: a process that srun has left behind may hold the pipe
    return report.report_cause() or as_a_shell(srun.returncode)
