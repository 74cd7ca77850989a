"""How many ranks a Slurm allocation gets on each node, and how srun is told so."""

import re
import sys
from collections.abc import Mapping

# What salloc or the site may have left behind, also a job from which this one was submitted. srun
# would prefer it to its options, or refuse it. A step without a request gets what its job has.
REMOVED = """NTASKS NPROCS NTASKS_PER_NODE NTASKS_PER_GPU NTASKS_PER_TRES CPUS_PER_TASK CPUS_PER_GPU
TRES_PER_TASK EXACT HINT EXCLUSIVE MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE THREADS_PER_CORE
DISTRIBUTION GPUS GPUS_PER_NODE GPUS_PER_SOCKET GRES STEP_GRES HOSTFILE LABELIO"""
REMOVED = {f"SLURM_{name}" for name in REMOVED.split()} | {"SRUN_CPUS_PER_TASK"}


def in_a_step(environment: Mapping[str, str]) -> bool:
    """Return whether this runs in a step: salloc's shell and a batch script have higher numbers."""
    step = int(environment.get("SLURM_STEP_ID", 2**32 - 1))
    return "SLURM_PROCID" in environment and step < 2**32 - 6


def for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun: nothing in it competes with the options."""
    kept = {name: value for name, value in environment.items() if name not in REMOVED}
    if in_a_step(environment):
        kept.pop("SLURM_CPU_BIND", None)
    return kept


def expand(text: str) -> list[int]:
    """Return the numbers of a list of Slurm: [4, 4, 3] of 4(x2),3. Spaces may separate it, too."""
    numbers = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(number)] * int(times or 1)
    return numbers


def count_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs this node has for the job. At Jülich, Slurm only lists them."""
    listed = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
    counted = environment.get("SLURM_GPUS_ON_NODE")
    return int(counted or (len(listed.split(",")) if listed else 0))


def choose_ranks(gpus: list[int], environment: Mapping[str, str]) -> list[int]:
    """Return how many ranks each node gets: as many as tasks were asked for, or as its GPUs."""
    nodes = len(gpus)
    each = int(environment.get("SLURM_NTASKS_PER_NODE") or 0)
    tasks = int(environment.get("SLURM_NTASKS") or 0)
    # About CPUs if no tasks were asked for.
    shares = expand(environment.get("SLURM_TASKS_PER_NODE", ""))
    smaller = in_a_step(environment) and len(shares) != nodes  # than the job: tasks are its own
    if each and (smaller or tasks in (0, each * nodes)):
        return [each] * nodes
    # srun --pty counts its shell as a task, even if none was asked for.
    only_shells = in_a_step(environment) and tasks == nodes
    if not tasks or len(shares) != nodes or only_shells:
        return gpus
    return shares


def options_of(
    nodes: list[str], ranks: list[int], torchrun: bool, environment: Mapping[str, str]
) -> tuple[int, list[str]]:
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
    options = ["--export=ALL", "--kill-on-bad-exit=1", "--input=none", "--quit-on-interrupt"]
    if in_a_step(environment):  # in a shell of srun, which holds all that the job has
        options.append("--overlap")
    if torchrun:
        asked = environment.get("SLURM_TRES_PER_TASK", "")
        if most > 1 and ("gpu" in asked or environment.get("SLURM_GPUS_PER_TASK")):
            words = "a node has one task, and --gpus-per-task gives it the GPUs of one rank."
            sys.exit(f"With --torchrun {words} Ask with --gpus-per-node instead.")
        options += [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
        options += ["--ntasks-per-node=1", "--distribution=block"]
        if same_cpus:  # otherwise each has all CPUs of its node
            options += [f"--cpus-per-task={cpus * most or cpus_on[0]}"]
        return cpus, options
    options += [f"--ntasks={sum(ranks)}", f"--cpus-per-task={cpus or 1}"]
    if same_cpus and len(set(ranks)) == 1:
        options += [f"--nodes={len(nodes)}", f"--ntasks-per-node={most}", "--distribution=block"]
    else:  # Slurm might place them differently: name the node of each rank
        names = [node for node, count in zip(nodes, ranks) for _ in range(count)]
        options += [f"--nodelist={','.join(names)}", "--distribution=arbitrary"]
    if not cpus:
        options += ["--overcommit"]
    return cpus, options
