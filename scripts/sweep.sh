#!/usr/bin/env bash
# Tries learning rates: runs lesson 8 with each of them, and keeps what it prints in runs/sweep/.
#
# Usage: scripts/sweep.sh [argument of lesson 8]...   one run after the other, on this machine
#    sbatch scripts/sweep.sh [argument of lesson 8]...   as a job array of Slurm, two at a time
# Then: python scripts/collect_sweep.py                  one table and one plot
# Python is the one that is active where you call it, or PYTHON. The lines #SBATCH are explained in
# scripts/sbatch_run.sh.

# The numbers of the runs, and how many may run at a time. The run with number N takes rates[N].
#SBATCH --array=0-4%2
#SBATCH --account=<acc_name>_g
#SBATCH --time=00:10:00
#SBATCH --nodes=1
#SBATCH --constraint=gpu
#SBATCH --gpus-per-node=4
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --job-name=sweep
#SBATCH --output=/dev/null

set -euo pipefail

rates=(0.000625 0.00125 0.0025 0.005 0.01)

# Run lesson 8 with the learning rate $1, in a folder of its own.
run() {
  local folder=runs/sweep/lr-$1
  mkdir -p "$folder"
  echo "== learning rate $1"
  (cd "$folder" && "${PYTHON:-python}" "$course/day1/8_mnist_ddp_pt_lr.py" --lr "$1" "${@:2}") 2>&1 |
    tee "$folder/output.txt"
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit
fi

original=${BASH_SOURCE[0]}
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  mkdir -p logs
  exec >>"logs/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out" 2>&1
  # Slurm runs a copy of this file. The job knows where the original is.
  original=$(scontrol show job "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" |
    sed -n 's/^ *Command=\(.*sweep\.sh\).*/\1/p')
  if [[ -z ${rates[SLURM_ARRAY_TASK_ID]:-} ]]; then
    echo "There is no rate with the number $SLURM_ARRAY_TASK_ID: see the list in scripts/sweep.sh"
    exit 1
  fi
  rates=("${rates[SLURM_ARRAY_TASK_ID]}")
fi
course=$(cd "$(dirname "$original")/.." && pwd)

for rate in "${rates[@]}"; do
  run "$rate" "$@"
done
