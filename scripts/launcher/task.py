"""One task of the step that srun has started: it runs one rank, and tells if the rank fails."""

import os
import signal
import subprocess
import time

from launcher.errors import as_a_shell, ending, say
from launcher.meeting_point import address_and_interface, variables_of
from launcher.monitor import watched
from launcher.srun_options import count_gpus, expand
from launcher.start_rank import command_of, threads


def run(options):
    """Run this task's rank, or with --torchrun its node's torchrun. Return its exit status."""
    node = os.environ["SLURMD_NODENAME"]
    address, interface = address_and_interface(node, leads_to=os.environ["MASTER_ADDR"])
    variables = {**variables_of_rank(os.environ, options.torchrun), **variables_of(interface)}
    command, environment = command_of(options, variables, address)
    # At Ctrl-C the rank may say something. This process would only add a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}-{node}"
    with watched([log] if options.monitor and variables["LOCAL_RANK"] == "0" else []):
        status, told = run_and_pass_sigterm_on(command, environment)
    if status and not told:
        who = "torchrun" if options.torchrun else f"rank {variables['RANK']}"
        say(f"launcher: {time.time():.6f} {who} on {node} ended with {ending(status)}\n")
        time.sleep(0.5)  # srun ends a job with the first of its tasks, and may drop what was said
    return as_a_shell(status)


def variables_of_rank(given, torchrun):
    """Return the variables of a rank, {name: text}, from those that Slurm and allocation.py set."""
    node = int(given["SLURM_NODEID"])
    tasks = expand(given["SLURM_STEP_TASKS_PER_NODE"])[node]
    cpus = int(given.get("SLURM_CPUS_PER_TASK") or int(given["SLURM_CPUS_ON_NODE"]) // tasks)
    ranks = expand(given["RANKS_PER_NODE"])[node]
    variables = {
        "RANK": given["SLURM_PROCID"],
        "LOCAL_RANK": given["SLURM_LOCALID"],
        "WORLD_SIZE": given["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(tasks),
        "MASTER_ADDR": given["MASTER_ADDR"],
        "MASTER_PORT": given["MASTER_PORT"],
        "RANKS_PER_NODE": str(ranks),
        "OMP_NUM_THREADS": threads(cpus * tasks // ranks, ranks),
    }
    gpus = count_gpus(given)
    if gpus and not torchrun:  # Slurm may show each task its own GPU only
        variables["GPUS_ON_NODE"] = str(gpus)
    return variables


def run_and_pass_sigterm_on(command, environment):
    """Run a command; return its exit status, and whether SIGTERM has come for it.

    Where Slurm tracks processes with control groups, it signals only those that it has started
    itself, such as this one. And the rank may have something to save.
    """
    running, told = [], []

    def pass_sigterm_on(number, frame):
        told.append(number)
        for process in running:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_sigterm_on)
    running.append(subprocess.Popen(command, env=environment))
    if told:  # before it was started
        running[0].send_signal(signal.SIGTERM)
    return running[0].wait(), bool(told)
