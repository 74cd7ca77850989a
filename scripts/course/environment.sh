# shellcheck shell=bash
# Sets "python" to an interpreter that has everything in requirements.txt. Sourced by run_course.sh
# and run_tests.sh; not a command of its own.
#
# 1. An active environment that has it all is used as it is.
# 2. Otherwise .venv is made beside the README. Where the active Python already has torch (a site
#    module, conda), .venv sees its packages, and torch and torchvision stay at the site's versions.
#    Otherwise they come from PyPI or, where TORCH_INDEX is set, from that index.
# It is made once for each active Python. Later only what requirements.txt has gained is installed.
# Its file made-from names the Python that was active, as the launcher compares it, and then a line
# for each Python and requirements for which it lacks nothing: where one fits, no Python is asked.

stop() {
  echo "$1" >&2
  return 1
}

# Install what requirements files ask for, in the environment that is the first argument.
install_requirements() {
  local folder=$1 index kept
  local -a pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check)
  pip+=(--constraint "$folder/constraints.txt" --requirement)
  # Without what the site has: for pip, its torch 2.6.0a0+site is older than torch>=2.6.
  kept=$(sed 's/==.*//' "$folder/constraints.txt" | paste -sd '|')
  grep -hvE "^(${kept:-#})([>=]|$)" "${@:2}" >"$folder/requirements.txt"
  if [[ -f $folder/torch-index ]]; then # both from one index, or both do not work
    index=$(<"$folder/torch-index")
    grep -E '^torch(vision)?[>=]' "$folder/requirements.txt" >"$folder/torch.txt"
    "${pip[@]}" "$folder/torch.txt" --index-url "$index" ||
      stop "torch and torchvision could not be installed from $index: the lines above say why." || return
  fi
  [[ -z ${torch:-} ]] || echo "torch==$torch" >>"$folder/requirements.txt"
  "${pip[@]}" "$folder/requirements.txt" ||
    stop "What is needed could not be installed into ${folder##*/}: the lines above say why."
}

# Make an environment in folder $1 with Python $2, which sees the packages in the folders $4 and so
# on if there is a torch to keep, $3. What it lacks is said as $lacks.
start_environment() {
  local folder=$1 writable=$1
  [[ -d $folder ]] || writable=${folder%/*}
  [[ -w $writable ]] ||
    stop "The packages of requirements.txt are missing, and $writable cannot be written to, so ${folder##*/} cannot be made there: activate an environment that has them, or copy the course to a folder of your own." || return
  if [[ -n $3 ]]; then
    echo "Making .venv with what the active Python lacks: $lacks. Kept: ${3// / and }."
  else
    echo "Making ${folder##*/} with torch from ${TORCH_INDEX:-PyPI} and all else that is needed: a few minutes, several GB."
  fi
  "$2" -m venv --clear "$folder" || stop "$folder could not be made: see above." || return
  printf '%s\n' "${3// /$'\n'}" >"$folder/constraints.txt"
  if [[ -n $3 ]]; then
    printf '%s\n' "${@:4}" >"$(echo "$folder"/lib/python3*/site-packages)/active-environment.pth"
  elif [[ -n ${TORCH_INDEX:-} ]]; then
    printf '%s\n' "$TORCH_INDEX" >"$folder/torch-index"
  fi
}

# make_environment ROOT [FILE]... wants the files of requirements besides ROOT/requirements.txt.
# Where "torch" is set, it is the version that an environment of its own, .venv-torch-VERSION, gets.
make_environment() {
  local base=${PYTHON:-python3} folder=$1/.venv${torch:+-torch-$torch}
  local path state facts site lacks kept index
  local -a files=("$1/requirements.txt" "${@:2}") lines
  python=$folder/bin/python
  path=$(command -v "$base") ||
    stop "There is no $base here. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3" || return
  state="$path $(readlink -f "$path") ${PYTHONPATH:-} $(cat "${files[@]}" | cksum)"
  if [[ -z ${TORCH_INDEX:-} ]] && grep -qsxF -- "$state" "$folder/made-from"; then
    return
  fi
  facts=$("$base" "${BASH_SOURCE[0]%.sh}.py" "${files[@]}") || return
  mapfile -t lines <<<"$facts"
  site=${lines[1]} lacks=${lines[2]}
  if [[ -n ${TORCH_INDEX:-} && -n $site && -z ${torch:-} ]]; then
    echo "TORCH_INDEX is not used: the active environment has torch already." >&2
  fi
  if [[ -z $lacks && -z ${torch:-} ]]; then
    python=$base
    return
  fi
  # As in: /home/me/course/.venv/constraints.txt:torch==2.6.0
  kept=$(grep -Hsm 1 '^torch==' "$folder/constraints.txt" "${path%/*/*}/constraints.txt" || true)
  if [[ -n $kept && -z $site && -z ${torch:-} ]]; then
    kept="${kept%%/constraints.txt:*} was made for the torch ${kept##*==} of an environment"
    stop "$kept that is not active now. Activate that one first, for example with module load. To do without it, deactivate or delete ${kept%% was made*}." || return
  fi
  index=$(cat "$folder/torch-index" 2>/dev/null || true)
  if [[ ${path%/*} -ef $folder/bin ]] ||
    [[ $(head -n 1 "$folder/made-from" 2>/dev/null) == "${lines[0]}" && ${TORCH_INDEX:-$index} == "$index" ]]; then
    echo "Installing what ${folder##*/} lacks."
  else
    [[ -z ${torch:-} ]] || site=''
    start_environment "$folder" "$base" "$site" "${lines[@]:3}" || return
  fi
  install_requirements "$folder" "${files[@]}" || return
  # Only now: what is half made is made again.
  [[ -s $folder/made-from ]] || printf '%s\n' "${lines[0]}" >"$folder/made-from"
  printf '%s\n' "$state" >>"$folder/made-from"
}
