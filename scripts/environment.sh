# shellcheck shell=bash
# Sets "python" to an interpreter that has everything in requirements.txt. Sourced by run_course.sh
# and run_tests.sh; not a command of its own.
#
# 1. An active environment that has it all is used as it is.
# 2. Otherwise .venv is made beside the README. Where the active Python already has torch (a site
#    module, conda), .venv sees its packages, and torch and torchvision stay at the site's versions.
# Nothing is downloaded again until requirements.txt or the active Python changes.

# Say what does not fit among the packages of $python. Nothing is imported: that would take seconds.
check_versions() {
  "$python" - <<'PY'
import re, sys
from importlib.metadata import requires, version

torch, vision = version("torch"), version("torchvision")
if [*map(int, torch.split(".")[:2])] < [2, 6]:
    sys.exit(f"torch 2.6 or newer is needed; this environment has {torch}. Load a newer module, or leave it: deactivate")
for needed in re.findall(r"^torch ?\(?==([\d.]+)", "\n".join(requires("torchvision") or ()), re.M):
    if needed != re.match(r"[\d.]+\d", torch)[0]:
        sys.exit(f"torchvision {vision} is made for torch {needed}; this environment has {torch}. Install both anew, together.")
PY
}

make_environment() {
  local root=$1 base=${PYTHON:-python3} stamp marker torch_versions
  if ! command -v "$base" >/dev/null; then
    echo "There is no $base here. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3" >&2
    return 1
  fi
  if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python 3.11 or newer is needed; $base is $("$base" -V). Name a newer one: PYTHON=python3.12" >&2
    return 1
  fi
  if "$base" - 2>/dev/null <<'PY'
import importlib.util, sys
names = "torch torchvision tensorboard torch_tb_profiler h5py accelerate tqdm matplotlib jinja2 viztracer"
names += " pytest xdist pytest_timeout"
sys.exit(any(importlib.util.find_spec(name) is None for name in names.split()))
PY
  then
    python=$base
    check_versions
    return
  fi
  python=$root/.venv/bin/python
  stamp=$root/.venv/made-from
  marker=$("$base" -c 'import sys; print(sys.prefix, sys.version)' && cat "$root/requirements.txt")
  if [[ -f $stamp && $(<"$stamp") == "$marker" ]]; then
    return
  fi
  torch_versions=$(
    "$base" - <<'PY' 2>/dev/null || true
from importlib.metadata import version
print(f"torch=={version('torch')}\ntorchvision=={version('torchvision')}")
PY
  )
  if [[ -n $torch_versions ]]; then
    echo "Making .venv with what the active Python lacks. Its ${torch_versions//$'\n'/ and } are kept."
  else
    echo "Making .venv and installing requirements.txt: a few minutes, several GB."
  fi
  "$base" -m venv --clear "$root/.venv"
  if [[ -n $torch_versions ]]; then
    # A .pth file makes the active environment's packages visible inside .venv.
    "$base" -c 'import sysconfig as s; print(*{s.get_path("purelib"), s.get_path("platlib")}, sep="\n")' \
      >"$("$python" -c 'import sysconfig as s; print(s.get_path("purelib"))')/active-environment.pth"
  fi
  printf '%s\n' "$torch_versions" >"$root/.venv/constraints.txt"
  "$python" -m pip install --quiet --disable-pip-version-check \
    --requirement "$root/requirements.txt" --constraint "$root/.venv/constraints.txt"
  printf '%s\n' "$marker" >"$stamp"
}
