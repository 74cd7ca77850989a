#!/usr/bin/env bash
# Starts a lesson on all nodes of a Slurm allocation, or on simulated ones: --help says how. The work
# is done by launcher/launch.py. Here, and again on each node, a Python with torch is found for it:
# PYTHON, or the one that environment.py names, or .venv's.
set -eu
# Slurm may warn a job before its lesson is ready for that. What a shell ignores, its children ignore.
trap '' USR1 USR2

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
launch=$root/scripts/launcher/launch.py
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  exec python3 "$launch" --help
fi
chosen=${PYTHON:-$(python3 "$root/scripts/environment.py" --which 2>/dev/null || true)}
for python in "$chosen" "$root/.venv/bin/python"; do
  if "$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' 2>/dev/null; then
    export PYTHON=$python
    # A script may start a container. Then what calls Slurm's commands runs outside, and ranks inside.
    if [[ -n ${SLURM_JOB_ID:-} && " $* " != *" --local "* && ${1:-} != --as-* &&
      $(head -c 2 "$(command -v "$python")") == '#!' ]]; then
      python=python3
    fi
    exec "$python" "$launch" "$@"
  fi
done
echo "No Python with torch on $(hostname). Load a module or activate an environment with Python 3.11 or newer, or make one: scripts/run_course.sh 0" >&2
exit 1
