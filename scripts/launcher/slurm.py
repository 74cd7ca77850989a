"""How many ranks a Slurm allocation gets on each node, and how srun is told so."""

import re
import sys


def expand(text):
    """Return the numbers of a list of Slurm: [4, 4, 3] of 4(x2),3. Spaces may divide it, too."""
    numbers = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(number)] * int(times or 1)
    return numbers


def count_gpus(environment):
    """Return how many GPUs this node has for the job. At Jülich, Slurm only lists them."""
    listed = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
    counted = environment.get("SLURM_GPUS_ON_NODE")
    return int(counted or (len(listed.split(",")) if listed else 0))


def choose_ranks(nodes, gpus, shared, environment):
    """Return how many ranks each node gets: as many as tasks were asked for, else as gpus says.

    nodes    how many there are
    gpus     for how many ranks each node has GPUs
    shared   whether this is in a shell of srun. srun --pty counts its shell as a task, also where
             none was asked for
    """
    each = int(environment.get("SLURM_NTASKS_PER_NODE") or 0)
    tasks = int(environment.get("SLURM_NTASKS") or 0)
    # About CPUs where no tasks were asked for.
    shares = expand(environment.get("SLURM_TASKS_PER_NODE", ""))
    if each and tasks in (0, each * nodes):
        return [each] * nodes
    if not tasks or len(shares) != nodes or (shared and tasks == nodes):
        return gpus
    return shares


def options_of(nodes, ranks, torchrun, environment):
    """Return how many CPUs each rank gets, and the options of srun for these ranks.

    nodes      the names of the nodes
    ranks      how many ranks each of them gets
    torchrun   whether each node gets one task, a torchrun, which starts the ranks there
    """
    cpus_on = expand(environment["SLURM_JOB_CPUS_PER_NODE"])
    same_cpus = len(set(cpus_on)) == 1
    # As many for each rank as it can have on every node. 0: there are fewer CPUs than ranks.
    wanted = int(environment.get("SLURM_CPUS_PER_TASK") or cpus_on[0])
    cpus = min(wanted, *(on // count for on, count in zip(cpus_on, ranks)))
    most = max(ranks)
    options = ["--kill-on-bad-exit=1", "--input=none", "--quit-on-interrupt"]
    if torchrun:
        if most != 1 and gpus_for_each_task(environment):
            words = "a node has one task, and --gpus-per-task gives it the GPUs of one rank."
            sys.exit(f"With --torchrun {words} Ask with --gpus-per-node instead.")
        options += [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        options += ["--distribution=block"]
        if same_cpus:  # otherwise each has all that there are on its node
            options += [f"--cpus-per-task={cpus * most or cpus_on[0]}"]
        return cpus, options
    options += [f"--ntasks={sum(ranks)}", f"--cpus-per-task={cpus or 1}"]
    if same_cpus and len(set(ranks)) == 1:
        options += [f"--nodes={len(nodes)}", f"--ntasks-per-node={most}", "--distribution=block"]
    else:  # Slurm might share them out in another way: name the node of each rank
        names = [node for node, count in zip(nodes, ranks) for _ in range(count)]
        options += [f"--nodelist={','.join(names)}", "--distribution=arbitrary"]
    if not cpus:
        options += ["--overcommit"]
    return cpus, options


def gpus_for_each_task(environment):
    """Return whether each task was given GPUs of its own."""
    of_task = environment.get("SLURM_TRES_PER_TASK", "")
    return bool(environment.get("SLURM_GPUS_PER_TASK")) or "gpu" in of_task
