#!/usr/bin/env bash
# Runs a lesson as a batch job on several nodes. What it prints goes to logs/slurm-JOB.out; how busy
# the nodes are, to logs/cpu-JOB*.out and logs/gpu-JOB*.out, one file a node.
#
# Usage: sbatch [option of sbatch]... scripts/sbatch_run.sh [option] FILE [argument of FILE]...
#   sbatch -N 2 --ntasks-per-node=4 --cpus-per-task=32 -C gpu --gpus-per-node 4 -t 30 \
#     -A <acc_name>_g scripts/sbatch_run.sh 10
# The rest is as for scripts/multinode_setup_and_run.sh.
#SBATCH --job-name=course
#SBATCH --output=/dev/null
#SBATCH --open-mode=append
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help || -z ${SLURM_JOB_ID:-} ]]; then
  sed -n '2,/^#SBATCH/{/^#SBATCH/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  [[ ${1:-} == -h || ${1:-} == --help ]]
  exit
fi
# Slurm would start nothing if the folder of its output were missing. So it gets none, and the
# folder is made here. Slurm runs a copy of this file; the job knows where the original is.
original=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*sbatch_run\.sh\).*/\1/p')
cd "$SLURM_SUBMIT_DIR"
mkdir -p logs
exec >>"logs/slurm-$SLURM_JOB_ID.out" 2>&1 # the same file if Slurm starts the job again

# Your site: what makes a Python with torch available, if it is not so when you call sbatch.
# module load pytorch
# source .venv/bin/activate
# conda activate course

exec "$(dirname "$original")/multinode_setup_and_run.sh" --monitor "$@"
