# shellcheck shell=bash
# Sets "python" to an interpreter that has everything in requirements.txt. Sourced by run_course.sh
# and run_tests.sh; not a command of its own.
#
# 1. An active environment that has it all is used as it is.
# 2. Otherwise .venv is made beside the README. Where the active Python already has torch (a site
#    module, conda), .venv sees its packages, and torch and torchvision stay at the site's versions.
#    Otherwise they come from PyPI or, where TORCH_INDEX is set, from that index.
# It is made once for each active Python. Later only what requirements.txt has gained is installed.

lacking=$(dirname "${BASH_SOURCE[0]}")/environment.py

# Install into the environment in folder $1 what it lacks of the requirements files $2 and so on. It
# names only these packages to pip: for pip, a site's torch 2.6.0a0+site is older than torch>=2.6.
install_requirements() {
  local folder=$1 index lacks
  local -a options=(--quiet --disable-pip-version-check) packages
  shift
  if [[ -f $folder/constraints.txt ]]; then
    options+=(--constraint "$folder/constraints.txt")
  fi
  if [[ -f $folder/torch-index ]]; then # both from one index, or both do not work
    index=$(<"$folder/torch-index")
    if ! "$folder/bin/python" -m pip install "${options[@]}" --constraint "$1" \
      --index-url "$index" torch torchvision; then
      echo "torch and torchvision could not be installed from $index: the lines above say why." >&2
      return 1
    fi
  fi
  if ! lacks=$("$folder/bin/python" "$lacking" "$@"); then
    mapfile -t packages <<<"$lacks"
    if [[ -z $lacks ]] || ! "$folder/bin/python" -m pip install "${options[@]}" "${packages[@]}"; then
      echo "What is needed could not be installed into ${folder##*/}: the lines above say why." >&2
      return 1
    fi
  fi
}

# Say that TORCH_INDEX changes nothing: the environment in folder $1 has torch, not from there.
say_if_index_is_not_used() {
  local from=''
  [[ ! -f $1/torch-index ]] || from=$(<"$1/torch-index")
  if [[ ${TORCH_INDEX:-$from} != "$from" ]]; then
    echo "TORCH_INDEX is not used: $1 has torch already. Another torch needs another environment." >&2
  fi
}

# make_environment ROOT [FILE]... wants the files of requirements besides ROOT/requirements.txt.
# Where "torch" is set, it is the version of torch that must be there: .venv-torch-VERSION has it.
make_environment() {
  local root=$1 wanted=${torch:-} base=${PYTHON:-python3} folder lacks here made_from writable
  local place site='' kept=''
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
for name in ("torch", "torchvision"):
    print(f"{name}=={version(name)}")
PY
  )
  if [[ -z $wanted ]]; then
    "$base" "$lacking" --torch >&2 || return
  fi
  here=$("$base" -c 'import os, sys; print(os.path.realpath(sys.prefix))')
  if lacks=$("$base" "$lacking" "${files[@]}") &&
    [[ -z $wanted || ${site%%[+$'\n']*} == "torch==$wanted" ]]; then
    say_if_index_is_not_used "$here"
    python=$base
    return
  fi

  folder=$root/.venv${wanted:+-torch-$wanted}
  python=$folder/bin/python
  if [[ -z $wanted && -z $site ]]; then
    for place in "$folder" "$here"; do
      kept=$(sed -n 's/^torch==//p' "$place/constraints.txt" 2>/dev/null || true)
      if [[ -n $kept ]]; then
        echo "$place was made for the torch $kept of an environment that is not active now. Activate that one first, for example with module load. To do without it, deactivate or delete $place." >&2
        return 1
      fi
    done
  fi
  made_from=$("$base" -c 'import sys; print(sys.prefix, sys.version)')
  if [[ -d $folder && $here == "$(cd "$folder" && pwd -P)" ]] || # it is the active one
    [[ -f $folder/made-from && $(head -n 1 "$folder/made-from") == "$made_from" ]]; then
    say_if_index_is_not_used "$folder"
    if ! lacks=$("$python" "$lacking" "${files[@]}"); then
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
    echo "Making .venv with what the active Python lacks: ${lacks//$'\n'/, }. Kept: ${site//$'\n'/ and }."
  elif [[ -n ${TORCH_INDEX:-} ]]; then
    echo "Making .venv with torch from $TORCH_INDEX, and installing requirements.txt: a few minutes."
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
    if [[ -n ${TORCH_INDEX:-} ]]; then
      say_if_index_is_not_used "$here"
    fi
  elif [[ -n ${TORCH_INDEX:-} ]]; then
    printf '%s\n' "$TORCH_INDEX" >"$folder/torch-index"
  fi
  # pip finds the torchvision that fits.
  printf '%s\n' "${wanted:+torch==}${wanted:-$site}" >"$folder/constraints.txt"
  install_requirements "$folder" "${files[@]}" || return
  printf '%s\n' "$made_from" >"$folder/made-from" # only now: what is half made is made again
}
