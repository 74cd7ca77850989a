# shellcheck shell=bash
# Sets "python" to an interpreter that has everything in requirements.txt. Sourced by run_course.sh
# and run_tests.sh; not a command of its own.
#
# 1. An active environment that has it all is used as it is.
# 2. Otherwise .venv is made beside the README. Where the active Python already has torch (a site
#    module, conda), .venv sees its packages, and torch and torchvision stay at the site's versions.
# It is made once for each active Python. Later only what requirements.txt has gained is installed.

# Install into the environment in folder $1 the requirements files $2 and so on.
install_requirements() {
  local folder=$1 file
  local -a options=(--quiet --disable-pip-version-check)
  shift
  for file in "$@"; do options+=(--requirement "$file"); done
  if [[ -f $folder/constraints.txt ]]; then
    options+=(--constraint "$folder/constraints.txt")
  fi
  if ! "$folder/bin/python" -m pip install "${options[@]}"; then
    echo "What is needed could not be installed into ${folder##*/}: the lines above say why." >&2
    return 1
  fi
}

# make_environment ROOT [FILE]... wants the files of requirements besides ROOT/requirements.txt.
# Where "torch" is set, it is the version of torch that must be there: .venv-torch-VERSION has it.
make_environment() {
  local root=$1 wanted=${torch:-} base=${PYTHON:-python3} folder lacks here made_from writable site=''
  local -a files=("$root/requirements.txt" "${@:2}")
  if ! command -v "$base" >/dev/null; then
    echo "There is no $base here. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3" >&2
    return 1
  fi
  if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python 3.11 or newer is needed; $base is $("$base" -V). Name a newer one: PYTHON=python3.12" >&2
    return 1
  fi
  site=$(
    "$base" - <<'PY' 2>/dev/null || true
from importlib.metadata import version
print(f"torch=={version('torch')}\ntorchvision=={version('torchvision')}")
PY
  )
  if [[ -z $wanted ]]; then
    "$base" "$root/scripts/lib/environment.py" --torch >&2 || return
  fi
  if lacks=$("$base" "$root/scripts/lib/environment.py" "${files[@]}") &&
    [[ -z $wanted || ${site%%[+$'\n']*} == "torch==$wanted" ]]; then
    python=$base
    return
  fi

  folder=$root/.venv${wanted:+-torch-$wanted}
  python=$folder/bin/python
  here=$("$base" -c 'import os, sys; print(os.path.realpath(sys.prefix))')
  made_from=$("$base" -c 'import sys; print(sys.prefix, sys.version)')
  if [[ -d $folder && $here == "$(cd "$folder" && pwd -P)" ]] || # it is the active one
    [[ -f $folder/made-from && $(head -n 1 "$folder/made-from") == "$made_from" ]]; then
    if ! lacks=$("$python" "$root/scripts/lib/environment.py" "${files[@]}"); then
      echo "Installing what ${folder##*/} lacks: ${lacks//$'\n'/, }."
      install_requirements "$folder" "${files[@]}"
    fi
    return
  fi
  writable=$folder
  [[ -d $writable ]] || writable=$root
  if [[ ! -w $writable ]]; then
    echo "The packages of requirements.txt are missing, and $writable cannot be written to, so ${folder##*/} cannot be made there: activate an environment that has them, or copy the course to a folder of your own." >&2
    return 1
  fi
  if [[ -n $wanted ]]; then
    echo "Making ${folder##*/} with torch $wanted and what else the tests need: a few minutes, several GB."
    site=''
  elif [[ -n $site ]]; then
    echo "Making .venv with what the active Python lacks: ${lacks//$'\n'/, }. Its ${site//$'\n'/ and } are kept."
  else
    echo "Making .venv and installing requirements.txt: a few minutes, several GB."
  fi
  "$base" -m venv --clear "$folder" || {
    echo "${folder##*/} could not be made in $root: see above." >&2
    return 1
  }
  if [[ -n $site ]]; then
    # A .pth file makes the active environment's packages visible inside .venv.
    "$base" - <<'PY' >"$("$python" -c 'import sysconfig as s; print(s.get_path("purelib"))')/active-environment.pth"
import os, sys
of_a_module = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # seen while that is loaded
for folder in sys.path:
    if os.path.basename(folder) in ("site-packages", "dist-packages") and folder not in of_a_module:
        print(folder)
PY
  fi
  # pip finds the torchvision that fits.
  printf '%s\n' "${wanted:+torch==}${wanted:-$site}" >"$folder/constraints.txt"
  install_requirements "$folder" "${files[@]}" || return
  printf '%s\n' "$made_from" >"$folder/made-from" # only now: what is half made is made again
}
