#!/usr/bin/env bash
# Runs the lessons on this machine and ends with a table of what they showed. The report of the run,
# with figures, is one page: runs/report.html.
#
# Usage: scripts/run_course.sh [--list] [day1 | day2 | LESSON]...
#   scripts/run_course.sh            all lessons
#   scripts/run_course.sh day1       the lessons of day 1
#   scripts/run_course.sh 4 6 8      these lessons
#   scripts/run_course.sh --list     list the lessons
#
# Makes .venv first if the active Python lacks the packages of requirements.txt, and chooses PyTorch's
# build for this machine. To name another: TORCH_INDEX=https://download.pytorch.org/whl/cpu
# What the lessons write (runs/, log/, log_ddp/) goes to the current folder.
# As a batch job on one node: sbatch --wrap 'scripts/run_course.sh day1'
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit
fi
python=${PYTHON:-python3}
if [[ $("$python" -c 'print("works")' 2>&1) != works ]]; then
  echo "$python is no Python that works here. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3" >&2
  exit 1
fi
exec "$python" "$root/scripts/environment.py" -- "$root/scripts/runner/run_course.py" "$@"
