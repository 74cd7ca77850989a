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
    for node in range(NODES):
        commands = [words for place, words in started if place == node]
        print(f"node{node}: {len(commands)} times torchrun")
        for words in commands:
            print(f"  {words}")


# ---- A cluster of two nodes, node0 and node1, that only notes what would be started

NODES = 2
STAND_INS = {
    "scontrol": "printf 'node%s\\n' 0 1",
    "hostname": "echo node$SLURM_NODEID",
    "torchrun": 'echo "$SLURM_NODEID" "$@" >>"$NOTES"',
    # On every node, as often as there are tasks
    "srun": """
while [[ $1 == -* ]]; do
  option=${1%%=*} value=${1#*=}
  case $1 in
    -[Nnc] | --nodes | --ntasks | --ntasks-per-node) value=$2 && shift ;;
  esac
  case $option in
    --ntasks-per-node) SLURM_NTASKS_PER_NODE=$value ;;
    -n | --ntasks) SLURM_NTASKS_PER_NODE=$((value / 2)) ;;
  esac
  shift
done
for SLURM_NODEID in 0 1; do
  for ((i = 0; i < SLURM_NTASKS_PER_NODE; i++)); do
    SLURM_NODEID=$SLURM_NODEID "$@"
  done
done""",
}


def simulate(script):
    """Return what a batch script starts: a list of (node, the words after torchrun)."""
    tasks = re.search(r"^#SBATCH +--ntasks-per-node[= ](\d+)", script, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in STAND_INS.items():
            file = Path(folder, name)
            file.write_text(f"#!/bin/bash\n{text}\n")
            file.chmod(0o755)
        notes = Path(folder, "notes")
        notes.touch()
        variables = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "NOTES": str(notes),
            "SLURM_NODEID": "0",  # Slurm runs the script itself on the first node only
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NNODES": str(NODES),
            "SLURM_NTASKS_PER_NODE": tasks[1] if tasks else "1",
        }
        command = ["bash", "-c", script]
        subprocess.run(command, env=os.environ | variables, timeout=10, check=False)
        lines = notes.read_text().splitlines()
    return [(int(line.split()[0]), " ".join(line.split()[1:])) for line in lines]


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
