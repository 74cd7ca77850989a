#!/usr/bin/env bash
# Starts a lesson on all nodes of a Slurm allocation: a process, called rank, for each task that you
# asked for (-n, --ntasks-per-node). Where you asked for none: for each GPU, else for each node.
#
# Usage: scripts/multinode_setup_and_run.sh [option]... FILE [argument of FILE]...
#   FILE           a path, the name of a lesson's file, or a lesson's number
#   --local N[xM]  no Slurm: imitate N nodes with M ranks each (1) on this machine
#   --torchrun     on each node one torchrun starts the ranks, instead of srun
#   --max-restarts N  the same, and when a rank fails all start again, at most N times; what the
#                  ranks say on stderr goes to runs/torchrun/
#   --monitor      write how busy each node is to logs/cpu-*.out and logs/gpu-*.out (with vmstat
#                  and nvidia-smi, rocm-smi or xpu-smi)
#   --dry-run      print what would be started
#
# Inside an allocation:
#   salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 \
#     --constraint gpu --gpus-per-node 4 --account=<acc_name>_g
#   scripts/multinode_setup_and_run.sh 9
# As a step of its own:
#   srun --nodes 2 --ntasks-per-node=4 --cpus-per-task=32 scripts/multinode_setup_and_run.sh 9
#
# Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and LOCAL_WORLD_SIZE.
# What you set yourself stays: MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS, GLOO_SOCKET_IFNAME,
# NCCL_SOCKET_IFNAME, PYTHON. PYTHON may be a script that starts it in a container: day2/SITES.md.
# DIST_TIMEOUT is the seconds that a rank waits in a collective (60).
# Exit status 69: this machine or this version of PyTorch cannot run the lesson, as it has said.
set -euo pipefail
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "bash 4.4 or newer is needed, and the first one in PATH is $BASH_VERSION. On a Mac: brew install bash" >&2
  exit 1
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$root/scripts/multinode_setup_and_run.sh
launch=$root/scripts/launcher/launch.py # starts the ranks and sees how they end
dry_run='' local='' options=()

fail() {
  echo "$1" >&2
  exit 1
}

# Set file to the path of what the user named.
find_file() {
  local match
  for match in "$1" "$root"/day*/"$1" "$root"/day*/"$1".py "$root"/day*/"$1"_*.py; do
    if [[ -f $match ]]; then
      file=$(realpath "$match")
      return
    fi
  done
  fail "There is no lesson and no file '$1'. These are the lessons: scripts/run_course.sh --list"
}

# Set python to an interpreter that has torch: PYTHON, or python3, or that of .venv. Where .venv was
# made from this python3, such as that of a site's module, it comes first: it sees the same torch,
# and has what the other lacks.
find_python() {
  local venv=$root/.venv
  local -a candidates=(python3 "$venv/bin/python")
  if [[ -f $venv/made-from && $(head -n 1 "$venv/made-from") == "$(
    python3 -c 'import sys; print(sys.prefix, sys.version)' 2>/dev/null
  )" ]]; then
    candidates=("$venv/bin/python" python3)
  fi
  for python in ${PYTHON:+"$PYTHON"} "${candidates[@]}"; do
    if "$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' 2>/dev/null; then
      return
    fi
  done
  fail "No Python with torch on $(hostname). Load a module or activate an environment, or make one: scripts/run_course.sh 0"
}

# Print how the others reach Slurm's node $1: by its name, or by the address that Slurm knows.
address_of() {
  if getent hosts "$1" >/dev/null; then
    echo "$1"
  else
    scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
  fi
}

# Print the interface through which this machine reaches host $1: a fast network if it has one.
interface_to() {
  local address name PATH=$PATH:/usr/sbin:/sbin
  if [[ $1 == 127.* ]]; then # all nodes are on this machine
    echo lo
    return
  fi
  for name in hsn0 ib0; do
    if [[ -n $(ip -4 -o address show dev "$name" up 2>/dev/null) ]]; then
      echo "$name"
      return
    fi
  done
  address=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')
  name=$(ip -4 -o address show 2>/dev/null | awk -v a="$address" 'index($4, a "/") == 1 {print $2; exit}')
  if [[ -z $name ]]; then
    name=$(ip -4 -o route get "${address:-0.0.0.0}" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')
  fi
  # A machine may know its own name as 127.0.1.1, where no other can reach it.
  if [[ -z $name || $name == lo ]]; then
    name=$(ip -4 -o address show up scope global 2>/dev/null | awk 'NR == 1 {print $2}')
  fi
  echo "$name"
}

# Print how the others reach this node through interface $2: by name $1 if that leads there. It may
# lead into a slower network, or to 127.0.1.1, the node itself. Then by the interface's own address.
own_address() {
  local addresses PATH=$PATH:/usr/sbin:/sbin
  addresses=$(ip -4 -o address show dev "${2:--}" up 2>/dev/null | sed -n 's/.* inet \([0-9.]*\).*/\1/p')
  if [[ -z $addresses || $addresses == 127.* ]] || getent ahostsv4 "$1" | cut -d ' ' -f 1 | grep -xF "$addresses" >/dev/null; then
    echo "$1"
  else
    echo "${addresses%%$'\n'*}"
  fi
}

# Return whether this runs in a step: the shell of salloc and a batch script have a number above.
in_a_step() {
  [[ -n ${SLURM_PROCID:-} && ${SLURM_STEP_ID:-4294967295} -lt 4294967290 ]]
}

# Be one task of a Slurm step.
be_a_task() {
  local address interface
  MASTER_ADDR=${MASTER_ADDR:-$(address_of "$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)")}
  export MASTER_ADDR
  interface=$(interface_to "$MASTER_ADDR")
  if [[ -n $interface ]]; then # unless the user has chosen one
    # NCCL takes the beginning of a name, here of all cards of the fast network; gloo a whole name.
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-${interface/%hsn0/hsn}}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
  fi
  address=$(own_address "$(address_of "$SLURMD_NODENAME")" "${GLOO_SOCKET_IFNAME:-}")
  # Slurm can warn a job before its end. Python may not be ready for that yet, a shell never is.
  trap '' USR1 USR2
  exec "$python" "$launch" task --address "$address" "${options[@]}" -- "$file" "$@"
}

# Inside an allocation: choose, say what was chosen, start the step.
start_step() {
  local first probes nodes=() overlap=() plan=() command=()
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  if [[ ${#nodes[@]} != 1 && ${MASTER_ADDR:-} =~ ^(127\.|localhost) ]]; then
    fail "MASTER_ADDR is $MASTER_ADDR, where each node finds only itself: unset MASTER_ADDR"
  fi
  if in_a_step; then # in a shell of srun, which holds all that the job has
    overlap=(--overlap)
    unset SLURM_CPU_BIND
  fi
  # Ask the first node, for only there is it known which port is free.
  local -a ask=(--nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap)
  if [[ -n ${SLURM_GPUS:-} ]]; then # of all nodes together: ask each how many it has
    ask=(--nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 "${overlap[@]}")
  fi
  first=$((20000 + (SLURM_JOB_ID * 97 + RANDOM) % 10000))
  probes=$(srun_alone "${ask[@]}" "$script" --probe "$first" | sed -n 's/^probe: //p' | sort -n) ||
    fail "The first node, ${nodes[0]}, could not be asked for a free port: see above."
  mapfile -d '' -t plan < <(
    "$python" "$launch" plan --nodes "${nodes[*]}" --probes "$probes" --python "$python" \
      "${overlap[@]}" "${options[@]}" -- "$script" "${options[@]}" "$file" "$@"
  )
  ((${#plan[@]})) || exit 1 # it has said why
  export MASTER_ADDR=${plan[1]} MASTER_PORT=${plan[2]} RANKS_PER_NODE=${plan[3]}
  command=("${plan[@]:4}")
  echo "${plan[0]}"
  if [[ -n $dry_run ]]; then
    print_command srun "${command[@]}"
  else
    supervise srun_alone "${command[@]}"
  fi
}

# Become srun, with nothing but the options given: it prefers what salloc or the site left behind.
srun_alone() {
  local name remove=()
  for name in SLURM_{NTASKS,NPROCS,NTASKS_PER_{NODE,GPU,TRES},CPUS_PER_{TASK,GPU},TRES_PER_TASK,EXACT,HINT} SRUN_CPUS_PER_TASK; do
    remove+=(-u "$name")
  done
  exec env "${remove[@]}" srun --export=ALL "$@"
}

# Run a command that becomes srun, its stderr through launch.py, and return its exit status.
supervise() {
  local status=0 errors reader
  # They are for the ranks, whose last words are to be heard.
  exec {errors}> >(trap '' HUP INT TERM && exec "$python" "$launch" errors $$)
  reader=$!
  { ("$@" 2>&"$errors" {errors}>&-); } 2>/dev/null || status=$? # without what bash says of a kill
  exec {errors}>&-
  wait "$reader" || status=$? # srun may have another one: of a rank that it has ended
  return "$status"
}

# Print a command as one can type it.
print_command() {
  printf '%q ' "$@"
  echo
}

# On a node: print its number, for how many ranks it has GPUs, a free port, address and interface.
probe() {
  local address interface
  address=${MASTER_ADDR:-$(address_of "$SLURMD_NODENAME")}
  interface=${GLOO_SOCKET_IFNAME:-$(interface_to "$address")}
  address=${MASTER_ADDR:-$(own_address "$address" "$interface")}
  "$python" "$launch" probe "$1" "$address" "$interface"
}

main() {
  local wanted
  while [[ ${1:-} == -* ]]; do
    case $1 in
      -h | --help)
        sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$script"
        exit
        ;;
      --local)
        [[ ${2:-} =~ ^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})?$ ]] || fail "--local wants N or NxM, such as 2x4: nodes, and ranks on each."
        local=$2
        shift
        ;;
      --torchrun | --monitor) options+=("$1") ;;
      --max-restarts)
        [[ ${2:-} =~ ^[0-9]+$ ]] || fail "--max-restarts wants a number: how often the ranks may be started again."
        options+=("$1" "$2")
        shift
        ;;
      --dry-run) dry_run=1 ;;
      --probe)
        find_python
        probe "$2"
        exit
        ;;
      *) fail "There is no option $1. See scripts/multinode_setup_and_run.sh --help" ;;
    esac
    shift
  done
  [[ $# -gt 0 ]] || fail "Which lesson? For example: scripts/multinode_setup_and_run.sh 9. More: --help"
  wanted=$1
  find_file "$wanted"
  shift

  if [[ -n $local ]]; then
    find_python
    if [[ -n $dry_run ]]; then
      "$python" "$launch" local "$local" --python "$python" "${options[@]}" --dry-run
      print_command "$python" -u "$file" "$@"
    else
      trap '' USR1 USR2 # as in a step
      exec "$python" "$launch" local "$local" --python "$python" "${options[@]}" -- "$file" "$@"
    fi
  elif in_a_step && ! { : </dev/tty; } 2>/dev/null; then # a task has no terminal, a shell has one
    find_python
    be_a_task "$@"
  elif [[ -n ${SLURM_JOB_ID:-} ]]; then
    find_python
    start_step "$@"
  else
    fail "This is not inside a Slurm allocation. Get one:
  salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 --constraint gpu --gpus-per-node 4 --account=<acc_name>_g
or imitate two nodes on this machine:
  scripts/multinode_setup_and_run.sh --local 2x2 $wanted"
  fi
}

# All of the file is read before anything is started: it may change while a lesson runs.
main "$@"
exit
