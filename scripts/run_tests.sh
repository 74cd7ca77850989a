#!/usr/bin/env bash
# Runs the tests of the course.
#
# Usage: scripts/run_tests.sh [--torch VERSION] [--python PYTHON] [pytest arguments]
#   scripts/run_tests.sh                   all of them
#   scripts/run_tests.sh -k lesson_4       those whose name matches
#   scripts/run_tests.sh -m short          each lesson once, and an exercise: a few minutes
#   scripts/run_tests.sh --torch 2.6.0     the same with this torch and the torchvision that fits,
#                                          in an environment of their own, .venv-torch-2.6.0. What
#                                          came of it is written to runs/works_with/
#   scripts/run_tests.sh --torch 2.6.0 -k lesson_4       other tests with this torch
#   scripts/run_tests.sh --torch 2.6.0 --python python3.12   with this Python, too
#
# Makes .venv first where the active Python lacks the packages of requirements.txt and
# tests/requirements.txt. TORCH_INDEX acts as it does for run_course.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch='' arguments=()
while [[ ${1:-} == --torch || ${1:-} == --python || ${1:-} == -h || ${1:-} == --help ]]; do
  case $1 in
    --torch)
      torch=${2:-}
      if [[ ! $torch =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
        echo "--torch wants a version, such as 2.6.0." >&2
        exit 2
      fi
      oldest=$(sed -n 's/^torch>=//p' "$root/requirements.txt")
      if [[ $(printf '%s\n' "$oldest" "$torch" | sort -V | head -n 1) != "$oldest" ]]; then
        echo "The course needs torch $oldest or newer, not $torch." >&2
        exit 2
      fi
      ;;
    --python)
      PYTHON=${2:-}
      if [[ -z $PYTHON ]]; then
        echo "--python wants the name of a Python, such as python3.12." >&2
        exit 2
      fi
      ;;
    *)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      exit
      ;;
  esac
  shift 2
done
# shellcheck source=scripts/course/environment.sh
source "$root/scripts/course/environment.sh"
make_environment "$root" "$root/tests/requirements.txt"
cd "$root"
if [[ ! -w . ]]; then
  echo "$root cannot be written to, so pytest cannot remember which tests fail: --last-failed is not available. All tests can run."
  arguments=(-p no:cacheprovider)
fi
if [[ -n $torch && $# == 0 ]]; then
  arguments+=(-m short)
  export WORKS_WITH=runs/works_with
fi
PYTHON=$(command -v "$python")
export PYTHON # for the launcher, which the tests start
exec "$python" -m pytest "${arguments[@]}" "$@"
