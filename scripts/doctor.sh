#!/usr/bin/env bash
# Checks before a session whether lessons can run here: Python and its packages, GPUs, network,
# CPUs, shared files, data, /dev/shm, locked memory, and an all_reduce of 2 seconds. It takes 10 to
# 20 s, and never more than a minute and a half.
#
# Usage: scripts/doctor.sh [--local N[xM]]
#   Start it where you will start the lessons: inside the allocation, in the same folder.
#   --local N[xM]  no Slurm: imitate N nodes with M ranks each (1) on this machine
#
# Every rank of every node is checked, started by scripts/multinode_setup_and_run.sh as for a
# lesson. One line a check: "ok", or "FAIL" and what to do. Exit status 0 only if all are ok.
set -euo pipefail
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "bash 4.4 or newer is needed, and the first one in PATH is $BASH_VERSION. On a Mac: brew install bash" >&2
  exit 1
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
options=() arguments=()

while (($#)); do
  case $1 in
    -h | --help)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      exit
      ;;
    --local)
      options+=("${@:1:2}") arguments=(--imitated)
      shift
      ;;
    *)
      echo "There is no option $1. See scripts/doctor.sh --help" >&2
      exit 1
      ;;
  esac
  shift "$(($# > 0))"
done

# A node may hang and its rank never end: Slurm waits so many seconds for the last rank.
export SLURM_WAIT=35
# A rank that found a fault ends with status 0: otherwise Slurm would end the others before they
# have said what they found. The last line tells whether all is well.
"$root/scripts/multinode_setup_and_run.sh" "${options[@]}" "$root/scripts/doctor/doctor.py" \
  "${arguments[@]}" | {
  status=0
  while IFS= read -r line; do
    printf '%s\n' "$line"
    [[ $line != "=> not ready"* ]] || status=1
  done
  exit "$status"
}
