#!/usr/bin/env bash
# Runs the tests of the course: the quick ones, some minutes on two cores.
#
# Usage: scripts/run_tests.sh [--full] [--torch VERSION] [pytest arguments]
#   scripts/run_tests.sh                   the quick ones
#   scripts/run_tests.sh --full            all tests
#   scripts/run_tests.sh -k lesson_4       tests whose name matches
#   scripts/run_tests.sh --torch 2.6.0     with this torch and the torchvision that fits, in a
#                                          separate environment, .venv-torch-2.6.0
#   PYTHON=python3.12 scripts/run_tests.sh --torch 2.6.0     with this Python, too
#
# Skips what this machine can't do, and says why at the end. Makes .venv first if the active Python
# lacks the packages of requirements.txt and tests/requirements.txt. TORCH_INDEX acts as it does for
# run_course.sh.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=(--tests) arguments=(-m pytest)
while [[ ${1:-} =~ ^(--full|--torch|-h|--help)$ ]]; do
  case $1 in
    --full) arguments+=(-m '') ;;
    --torch)
      environment+=("${@:1:2}")
      shift "$(($# > 1))"
      ;;
    *)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' scripts/run_tests.sh
      exit
      ;;
  esac
  shift
done
exec "${PYTHON:-python3}" scripts/environment.py "${environment[@]}" -- "${arguments[@]}" "$@"
