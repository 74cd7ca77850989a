"""Exercise 10.4: a batch script for two nodes that keeps one of them waiting.

Lesson:  10
Kind:    find the fault, 20 minutes
Symptom: Two nodes with 4 GPUs each, one torchrun on each, eight ranks in one training:
         that's what the batch script is for. Three of its lines are wrong, so the job
         waits for ranks that never come. Here, Slurm and torchrun are stand-ins.
Run:     python day2/exercises/10.4_batch_script.py
Check:   python scripts/check.py 10.4
"""

import os
import re
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4

first=localhost

torchrun --nnodes=2 --nproc-per-node 4 --rdzv-backend=c10d \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29500" train.py
"""


def main():
    """Run on one rank: show which torchruns the script starts, and where."""
    started = simulate(SCRIPT)
    for node in NODES:
        commands = [words for place, words in started if place == node]
        print(f"{node}: {len(commands)} times torchrun")
        for words in commands:
            print(f"  {words}")


# ---- A cluster of two nodes with 4 GPUs each, that only notes what would be started

NODES = "node0", "node1"
STAND_INS = {
    "scontrol": r"printf '%s\n' $STAND_IN_NODES",
    "hostname": "echo $SLURMD_NODENAME",
    "torchrun": 'echo "$SLURMD_NODENAME" "$@" >>"$STAND_IN_NOTES"',
    # As often as there are tasks, divided among the nodes that it may use
    "srun": """
nodes=($STAND_IN_NODES) tasks=$SLURM_NTASKS each=0
while (($#)) && ! type -- "$1" &>/dev/null; do # an option, or its value
  if [[ $1 =~ ^(-[Nnw]|--[a-z-]+)=?(.*)$ ]]; then
    value=${BASH_REMATCH[2]:-$2}
    case ${BASH_REMATCH[1]} in
      -N | --nodes) nodes=("${nodes[@]:0:value}") ;;
      -w | --nodelist) nodes=(${value//,/ }) ;;
      -n | --ntasks) tasks=$value ;;
      --ntasks-per-node) each=$value ;;
    esac
  fi
  shift
done
tasks=$((each ? each * ${#nodes[@]} : tasks))
for ((task = 0; task < tasks; task++)); do
  export SLURM_PROCID=$task SLURM_NODEID=$((task * ${#nodes[@]} / tasks))
  export HOSTNAME=${nodes[SLURM_NODEID]} SLURMD_NODENAME=${nodes[SLURM_NODEID]}
  "$@"
done""",
}


def simulate(script, names=NODES):
    """Return what a batch script starts: a list of (node, the words after torchrun).

    names: of the two nodes, which differ in a number at the end.
    """

    def asked_for(option, default):
        found = re.search(rf"^#SBATCH.* (?:{option})[= ]?(\d+)", script, re.MULTILINE)
        return int(found[1]) if found else default

    names = names[: asked_for("-N|--nodes", 1)]
    per_node = asked_for("--ntasks-per-node", 1)
    tasks = asked_for("-n|--ntasks", per_node * len(names))
    numbers = ",".join(re.search(r"\d+$", name)[0] for name in names)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in STAND_INS.items():
            file = Path(folder, name)
            file.write_text(f"#!/bin/bash\n{text}\n")
            file.chmod(0o755)
        notes = Path(folder, "notes")
        notes.touch()
        node_list = re.sub(r"\d+$", f"[{numbers}]", names[0])
        variables = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "STAND_IN_NODES": " ".join(names),
            "STAND_IN_NOTES": str(notes),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": str(tasks),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            # Slurm runs the script itself on the first node only.
            **dict.fromkeys(("HOSTNAME", "SLURMD_NODENAME"), names[0]),
            **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), "0"),
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), node_list),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(len(names))),
            **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), "4"),
        }
        command = ["bash", "-c", script]
        subprocess.run(command, env=os.environ | variables, timeout=10, check=False)
        lines = notes.read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines]


# ---- Shared helpers, identical in every exercise


def start():
    """Be one rank: join the process group, run main, leave the group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    main()
    dist.barrier()  # leave together
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        start()
    else:  # started with python: let torchrun start the ranks
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options.append(__file__)
        torchrun(options)
