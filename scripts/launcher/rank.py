"""One task of the step that srun has started, and how it starts its rank, as simulated nodes do.

With --torchrun each node has one task, a torchrun, which starts the ranks there.
"""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping

from launcher.failures import as_a_shell, ending, write_stderr
from launcher.gpus import own_gpu_only
from launcher.rendezvous import address_and_interface, interface_variables
from launcher.srun_options import count_gpus, expand

# What a torchrun must not find: it sets these itself. Nodes may have different numbers of
# ranks, so the last one, which says that all nodes are the same, must not be set.
NOT_FOR_TORCHRUN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
NOT_FOR_TORCHRUN += ["MASTER_ADDR", "MASTER_PORT", "TORCH_ELASTIC_WORKER_IDENTICAL"]


def run_task(options: Namespace) -> int:
    """Run this task's rank, or with --torchrun its node's torchrun. Return its exit status."""
    node = os.environ["SLURMD_NODENAME"]
    address, interface = address_and_interface(node, leads_to=os.environ["MASTER_ADDR"])
    variables = variables_of_rank(os.environ, options.torchrun)
    os.environ.update(variables | interface_variables(interface))
    command = [sys.executable, "-u", *options.command]
    if options.torchrun:
        this, nodes = int(variables["RANK"]), int(variables["WORLD_SIZE"])  # a task is a node
        meeting = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        each = expand(os.environ["RANKS_PER_NODE"])[this]
        command = torchrun_command(options, this, nodes, each, address, *meeting)
    # At Ctrl-C, the rank may say something. This process would only add a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # If Slurm tracks processes with control groups, it signals only those that it has started
    # itself, such as this one. And the rank may have something to save.
    process, forwarded = start_and_forward_signals(command, [signal.SIGTERM])
    status = process.wait()
    if status and not forwarded:
        who = "torchrun" if options.torchrun else f"rank {variables['RANK']}"
        write_stderr(f"launcher: {time.time():.6f} {who} on {node} ended with {ending(status)}\n")
        time.sleep(0.5)  # srun ends a job with the first of its tasks, and may drop what was said
    return as_a_shell(status)


def variables_of_rank(given: Mapping[str, str], torchrun: bool) -> dict[str, str]:
    """Return the variables of a rank, {name: text}, from those that Slurm and slurm.py set."""
    node = int(given["SLURM_NODEID"])
    tasks = expand(given["SLURM_STEP_TASKS_PER_NODE"])[node]
    cpus = int(given.get("SLURM_CPUS_PER_TASK") or int(given["SLURM_CPUS_ON_NODE"]) // tasks)
    ranks = expand(given["RANKS_PER_NODE"])[node]
    variables = {
        "RANK": given["SLURM_PROCID"],
        "LOCAL_RANK": given["SLURM_LOCALID"],
        "WORLD_SIZE": given["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(tasks),
        "OMP_NUM_THREADS": threads(cpus * tasks // ranks, ranks),
    }
    gpus = count_gpus(given)
    if gpus and not torchrun and own_gpu_only(given):
        variables["GPUS_ON_NODE"] = str(gpus)
    return variables


def threads(cpus: int, ranks: int) -> str:
    """Return how many threads a rank should use: its CPUs, but at most its share of the machine's.

    It is a text, for the environment. What the user has set stays.
    """
    share = max(1, min(cpus, os.cpu_count() // ranks))
    return os.environ.get("OMP_NUM_THREADS") or str(share)


def torchrun_command(
    options: Namespace, node: int, nodes: int, each: int, address: str, host: str, port: str
) -> list[str]:
    """Return the command of a node's torchrun, which starts so many ranks each.

    They meet at host and port, and reach this node at its address. The environment of this process
    is changed for torchrun.
    """
    for name in NOT_FOR_TORCHRUN:
        os.environ.pop(name, None)
    # Or restarted ranks look for the old ones' addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Seconds for a rank to end, then by force.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
    command = f"""-m torch.distributed.run --nnodes {nodes}
    --nproc-per-node {each} --max-restarts {options.max_restarts or 0}
    --redirects {2 if options.max_restarts else 0} --log-dir runs/torchrun
    --rdzv-backend c10d --rdzv-id {port} --rdzv-endpoint {host}:{port}
    --rdzv-conf is_host={int(node == 0)} --local-addr {address}"""
    return [sys.executable, *command.split(), *options.command]


def start_and_forward_signals(
    command: list[str], signals: list[int], **options
) -> tuple[subprocess.Popen, list[int]]:
    """Start a command, pass signals on to it. Return its Popen object, and a list of those passed.

    What is ignored stays ignored.
    """
    running, forwarded = [], []

    def forward_signal(number, frame):
        forwarded.append(number)
        for process in running:
            process.send_signal(number)

    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward_signal)
    running.append(subprocess.Popen(command, **options))
    for number in forwarded:  # they came before it was started
        running[0].send_signal(number)
    return running[0], forwarded
