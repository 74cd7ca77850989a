#!/usr/bin/env bash
# Runs the tests of the course: the quick ones, some minutes on two cores.
#
# Usage: scripts/run_tests.sh [--full] [--torch VERSION] [--python PYTHON] [pytest arguments]
#   scripts/run_tests.sh                   the quick ones
#   scripts/run_tests.sh --full            all
#   scripts/run_tests.sh -k lesson_4       those whose name matches
#   scripts/run_tests.sh --torch 2.6.0     with this torch and the torchvision that fits, in an
#                                          environment of their own, .venv-torch-2.6.0
#   scripts/run_tests.sh --torch 2.6.0 --python python3.12   with this Python, too
#
# What this machine lacks is skipped, and the end says why. Makes .venv first where the active Python
# lacks the packages of requirements.txt and tests/requirements.txt. TORCH_INDEX acts as it does for
# run_course.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch='' arguments=()
while [[ ${1:-} =~ ^(--full|--torch|--python|-h|--help)$ ]]; do
  case $1 in
    --full) arguments+=(-m '') ;;
    --torch)
      torch=${2:-}
      if [[ ! $torch =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
        echo "--torch wants a version, such as 2.6.0." >&2
        exit 2
      fi
      shift
      ;;
    --python)
      PYTHON=${2:?--python wants the name of a Python, such as python3.12.}
      shift
      ;;
    *)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      exit
      ;;
  esac
  shift
done
# shellcheck source=scripts/course/environment.sh
source "$root/scripts/course/environment.sh"
make_environment "$root" "$root/tests/requirements.txt"
cd "$root"
[[ -w . ]] || arguments+=(-p no:cacheprovider) # then there is no --last-failed
exec "$python" -m pytest "${arguments[@]}" "$@"
