#!/usr/bin/env bash
# Checks, before a session, whether lessons can run here: Python and its packages, GPUs, CPUs, shared
# files, data, /dev/shm, network, and an all_reduce. It takes 5 to 20 s, never more than 40.
#
# Usage: scripts/doctor.sh [--local N[xM]]
#   Start it where you will start the lessons: inside the allocation, in the same folder.
#   --local N[xM]  no Slurm: simulate N nodes with M ranks each (1) on this machine
#
# Every rank of every node makes the checks, started by scripts/multinode_setup_and_run.sh as for a
# lesson. Each check prints "ok", or "FAIL" and what to do. The exit status is 0 only if all are ok.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit
fi
simulated=''
if [[ ${1:-} == --local ]]; then
  simulated=yes
elif [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "This is not inside a Slurm allocation: day2/NODES.md says how to get one. Without Slurm: scripts/doctor.sh --local 2x2" >&2
  exit 1
fi

# All nodes should see this file. If it cannot be made, the ranks say so.
token=$(mktemp .doctor-XXXXXX 2>/dev/null) || token=.doctor
trap 'rm -f "$token"' EXIT
export SLURM_WAIT=35 # seconds from the end of the first rank: a site may let Slurm wait less, or longer
# A rank may hang on its node, but must not keep the others from saying what they found. The exit
# status is the verdict's.
set +o pipefail
timeout --foreground --kill-after=10 40 "$scripts/multinode_setup_and_run.sh" "$@" \
  "$scripts/doctor/probe.py" "$token" ${simulated:+--simulated} |
  "${PYTHON:-python3}" "$scripts/doctor/table.py"
