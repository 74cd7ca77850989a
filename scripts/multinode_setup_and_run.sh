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
# NCCL_SOCKET_IFNAME, PYTHON. DIST_TIMEOUT is the seconds that a rank waits in a collective (60).
# Exit status 69: this machine or this version of PyTorch cannot run the lesson, as it has said.
set -euo pipefail
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "bash 4.4 or newer is needed, and the first one in PATH is $BASH_VERSION. On a Mac: brew install bash" >&2
  exit 1
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$root/scripts/multinode_setup_and_run.sh
torchrun='' restarts=0 monitor='' dry_run='' local='' options=() overlap=()

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

# Print a port that is free on this machine, at or after $1.
free_port() {
  "$python" - "$1" <<'PY'
import socket, sys

for port in range(int(sys.argv[1]), 65536):
    try:
        with socket.create_server(("", port)):
            print(port)
            break
    except OSError:
        pass
PY
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

# Set all to the entries of a Slurm list of numbers such as 4(x2),3.
expand() {
  local item i
  all=()
  for item in ${1//,/ }; do
    i=1
    if [[ $item == *x* ]]; then
      i=${item#*x} i=${i%)}
    fi
    while ((i-- > 0)); do all+=("${item%%(*}"); done
  done
}

# In a step: set SLURM_GPUS_ON_NODE where Slurm only lists the GPUs, as at Jülich.
count_gpus() {
  local list
  IFS=, read -ra list <<<"${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}"
  export SLURM_GPUS_ON_NODE=${SLURM_GPUS_ON_NODE:-${#list[@]}}
}

# Print how many CPUs this process may use. A Mac has no nproc.
count_cpus() {
  nproc "$@" 2>/dev/null || getconf _NPROCESSORS_ONLN
}

# Print how many threads a rank should use: its CPUs, but no more than its share of the machine's.
threads() {
  local cpus=$1 ranks=$2 share
  share=$(($(count_cpus --all) / ranks))
  echo $((share < 1 ? 1 : cpus < share ? cpus : share))
}

# Have the ranks talk through interface $1, unless the user has chosen one.
use_interface() {
  if [[ -n $1 ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$1} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$1}
  fi
}

# Print once a second how busy the GPUs are, with the tool $1 of their maker.
watch_gpus() {
  case $1 in
    nvidia-smi) exec nvidia-smi --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv --loop=1 ;;
    rocm-smi) while sleep 1; do rocm-smi --showuse --showmemuse --csv; done ;;
    xpu-smi) exec xpu-smi dump --device -1 --metrics 0,18 ;; # how busy, memory used
  esac
}

# Start to write how busy this machine is to logs/, in files called after $1. Set watchers to the
# processes that do so.
watch_machine() {
  local tool
  mkdir -p logs
  vmstat -n -t -S M 1 >>"logs/cpu-$1.out" 2>&1 &
  watchers+=($!)
  for tool in nvidia-smi rocm-smi xpu-smi; do
    if command -v "$tool" >/dev/null; then
      watch_gpus "$tool" >>"logs/gpu-$1.out" 2>&1 &
      watchers+=($!)
    fi
  done
}

# Be rank RANK, on the node called $1 with the address $2: run the lesson, and tell if it fails.
run_rank() {
  local node=$1 address=$2 status=0 who="rank $RANK" how now job=local-$MASTER_PORT
  shift 2
  local -a command=("$python" -u "$file" "$@") watchers=()
  if [[ -n $torchrun ]]; then
    who=torchrun
    command=(env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT
      -u TORCH_ELASTIC_WORKER_IDENTICAL    # nodes may have unequal numbers of ranks
      TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted ranks look for the old ones' addresses
      TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5     # seconds for a rank to end, then by force
      "$python" -m torch.distributed.run --nnodes "$WORLD_SIZE" --nproc-per-node "$RANKS_PER_NODE"
      --max-restarts "$restarts" --redirects "$((restarts ? 2 : 0))" --log-dir runs/torchrun
      --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$MASTER_PORT"
      --rdzv-conf "is_host=$((RANK == 0))" --local-addr "$address" "$file" "$@")
  fi
  if [[ -n $monitor && $LOCAL_RANK == 0 ]]; then
    if [[ $address != 127.* ]]; then
      job=$SLURM_JOB_ID.$SLURM_STEP_ID
    fi
    watch_machine "$job-${node// /-}"
  fi
  # Slurm can warn a job before its end. Python may not be ready for that yet, a shell never is.
  trap '' USR1 USR2
  "${command[@]}" || status=$?
  if ((${#watchers[@]})); then
    kill "${watchers[@]}" 2>/dev/null || true
  fi
  if ((status)); then
    how="exit status $status"
    if ((status > 128)); then
      how="signal $(kill -l $((status - 128)))"
    fi
    now=${EPOCHREALTIME:-$(date +%s.%6N)} # bash 4.4 does not know the first
    echo "launcher: ${now/,/.} $who on $node ended with $how" >&2
    sleep 0.5 # srun ends a job with the first of its tasks, and may drop what was just said
  fi
  exit "$status"
}

# Pass stderr on. In the end say which rank failed first, for the others fail because of it, and
# which node Slurm has lost. Return 69 if no rank failed, but the lesson cannot run here.
name_the_first() {
  local line status first='' lost='' cannot='' limit=()
  trap '' HUP INT TERM # they are for the ranks, whose last words are to be heard
  while true; do
    status=0
    IFS= read -r "${limit[@]}" line || status=$?
    if ((status > 128)); then # nothing for 15 s: srun may wait for a lost node without end
      limit=()
      if pkill -KILL -P $$ -x srun; then
        echo "A node does not answer: see the one with a * in sinfo -N. srun still waited for it." >&2
      fi
    elif ((status)); then
      break
    elif [[ $line != "launcher: "* ]]; then
      printf '%s\n' "$line" >&2
      if [[ $line =~ ^srun:\ error:.*([Ff]ailure|failed)\ on\ (node\ )?([^ :]+) ]]; then
        lost=${BASH_REMATCH[3]}
      elif [[ $line =~ ^\ *exitcode\ *:\ 69\  ]]; then # torchrun tells of a rank, and itself ends with 1
        cannot=1
      fi
    elif [[ -z $first || $line < $first ]]; then
      first=$line limit=(-t 15)
    fi
  done
  if [[ -n $cannot || $first == *" ended with exit status 69" ]]; then
    return 69
  elif [[ -n $first ]]; then
    echo "The first to fail: ${first#launcher: * }." >&2
  fi
  if [[ -n $lost ]]; then
    echo "Slurm has lost $lost, or cannot reach it. The rest follows from that." >&2
  fi
}

# Run a command, its stderr through name_the_first, and return its exit status.
supervise() {
  local status=0 errors reader
  exec {errors}> >(name_the_first)
  reader=$!
  { "$@" 2>&"$errors" {errors}>&-; } 2>/dev/null || status=$? # without what bash says of a kill
  exec {errors}>&-
  wait "$reader" || status=$? # srun may have another one: of a rank that it has ended
  return "$status"
}

# Print the variable that chooses GPUs on this machine, and the GPUs that are chosen, as it calls
# them: CUDA_VISIBLE_DEVICES 2 3. Without GPUs print nothing, and do not wait for torch.
find_gpus() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || [[ -e /dev/kfd || -e /dev/dri || -e /dev/dxg ]] || return 0 # dxg: WSL2
  "$python" - <<'PY'
import os

import torch

count = torch.accelerator.device_count()
kind = torch.accelerator.current_accelerator().type if count else "cpu"
name = "ZE_AFFINITY_MASK" if kind == "xpu" else "CUDA_VISIBLE_DEVICES"
if torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ:
    name = "HIP_VISIBLE_DEVICES"
if kind not in ("cpu", "mps"):  # the lessons do not use Apple's
    chosen = [x.strip() for x in os.environ.get(name, "").split(",") if x.strip()]
    print(name, *(chosen or range(count))[:count])
PY
}

# Imitate $1 nodes with $2 ranks each on this machine.
start_here() {
  local nodes=$1 ranks=$2 mask='' divided='' node on="the CPU" port
  local -a gpus=()
  shift 2
  port=${MASTER_PORT:-$(free_port $((20000 + RANDOM % 10000)))}
  read -r -a gpus <<<"$(find_gpus)"
  if ((${#gpus[@]})); then
    mask=${gpus[0]} gpus=("${gpus[@]:1}")
    on="${#gpus[@]} GPUs"
    if ((${#gpus[@]} >= nodes * ranks)); then
      divided=1
    elif ((nodes > 1 && ranks <= ${#gpus[@]})); then # each node would believe that it has enough
      on="the CPU, because there are fewer GPUs than ranks"
      export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 ONEAPI_DEVICE_SELECTOR=opencl:cpu
    fi
  fi
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads "$(count_cpus)" $((nodes * ranks)))}
  use_interface "lo$([[ $OSTYPE != darwin* ]] || echo 0)"
  echo "nodes: $nodes imitated on $(hostname), ranks on each: $ranks, in all: $((nodes * ranks))"
  echo "meeting point: 127.0.0.1:$port, interface $GLOO_SOCKET_IFNAME"
  echo "each rank: $OMP_NUM_THREADS threads of $python, on $on"
  if [[ -n $dry_run ]]; then
    printf '%q ' "$python" -u "$file" "$@"
    echo
    return
  fi
  export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port RANKS_PER_NODE=$ranks
  export WORLD_SIZE=$((nodes * ranks)) LOCAL_WORLD_SIZE=$ranks
  if [[ -n $torchrun ]]; then
    export WORLD_SIZE=$nodes LOCAL_WORLD_SIZE=1
  fi
  supervise run_all_here "$@"
}

# End the ranks with the process groups in pids: they are told to, and killed 5 s later.
# shellcheck disable=SC2329 # it is called, in a trap
end_ranks() {
  local i
  disown -a # or bash tells of each one that it has ended
  kill -TERM "${pids[@]/#/-}" 2>/dev/null || true
  for ((i = 0; i < 50; i++)); do
    kill -0 "${pids[@]/#/-}" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "${pids[@]/#/-}" 2>/dev/null || true
}

# Start the ranks of start_here; when one fails, end the others.
# shellcheck disable=SC2329 # it is called, through supervise
run_all_here() {
  local rank node share status=0 pids=()
  set -m # each rank in a process group of its own, so that it can be ended with its children
  trap 'end_ranks; exit 130' INT TERM
  for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    export RANK=$rank LOCAL_RANK=$((rank % LOCAL_WORLD_SIZE))
    node=$((rank / LOCAL_WORLD_SIZE))
    if [[ -n $divided ]]; then
      share=$(printf ',%s' "${gpus[@]:node*RANKS_PER_NODE:RANKS_PER_NODE}")
      export "$mask=${share#,}"
    fi
    run_rank "imitated node $node" 127.0.0.1 "$@" &
    pids+=($!)
  done
  for rank in "${pids[@]}"; do
    wait -n || {
      status=$?
      break
    }
  done
  if ((status)); then
    sleep 1 # the others end by themselves as a rule, and may say something
    for ((rank = 0; rank < WORLD_SIZE; rank++)); do
      # It is stopped, or busy with something else. With status 69 no rank has failed.
      if ((status != 69)) && kill -0 "${pids[rank]}" 2>/dev/null; then
        echo "Still running: rank $rank on imitated node $((rank / LOCAL_WORLD_SIZE))." >&2
      fi
    done
    end_ranks
  fi
  return "$status"
}

# Return whether this runs in a step: the shell of salloc and a batch script have a number above.
in_a_step() {
  [[ -n ${SLURM_PROCID:-} && ${SLURM_STEP_ID:-4294967295} -lt 4294967290 ]]
}

# Be one task of a Slurm step: take the variables from Slurm's.
be_a_task() {
  local all ranks cpus
  count_gpus
  expand "$SLURM_STEP_TASKS_PER_NODE"
  ranks=${all[SLURM_NODEID]}
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=$ranks
  MASTER_ADDR=${MASTER_ADDR:-$(address_of "$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)")}
  export MASTER_ADDR
  if [[ -z ${MASTER_PORT:-} ]]; then
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 97 + SLURM_STEP_ID * 7) % 10000))
    if [[ $RANK == 0 && $(free_port "$MASTER_PORT") != "$MASTER_PORT" ]]; then
      fail "Port $MASTER_PORT on $MASTER_ADDR is in use. Choose another one: export MASTER_PORT=29501"
    fi
  fi
  cpus=$((${SLURM_CPUS_PER_TASK:-SLURM_CPUS_ON_NODE / ranks} * ranks))
  if [[ -n $torchrun ]]; then
    ((ranks == 1)) || fail "With --torchrun a step has one task a node, which starts the ranks: srun --ntasks-per-node=1"
    expand "${RANKS_PER_NODE:-$((SLURM_GPUS_ON_NODE ? SLURM_GPUS_ON_NODE : 1))}"
    ranks=${all[SLURM_NODEID]:-${all[0]}}
    export RANKS_PER_NODE=$ranks
  fi
  if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    OMP_NUM_THREADS=$(threads $((cpus / ranks)) "$ranks")
    export OMP_NUM_THREADS
  fi
  use_interface "$(interface_to "$MASTER_ADDR")"
  run_rank "$SLURMD_NODENAME" "$(address_of "$SLURMD_NODENAME")" "$@"
}

# Set all to how many ranks each of $1 nodes gets: as many as tasks were asked for, else those in $2.
choose_ranks() {
  local each=${SLURM_NTASKS_PER_NODE:-} tasks=${SLURM_NTASKS:-}
  expand "${SLURM_TASKS_PER_NODE:-}" # about CPUs where no tasks were asked for
  if [[ -n $each && ${tasks:-$((each * $1))} == $((each * $1)) ]]; then
    expand "$each(x$1)"
  elif [[ -z $tasks || ${#all[@]} != "$1" || ${#overlap[@]} != 0 && $tasks == "$1" ]]; then
    expand "$2" # the last: srun --pty counts its shell as a task, also where none was asked for
  fi
}

# Inside an allocation: choose, say what was chosen, start the step.
start_step() {
  local nodes count here port address interface gpus first most=0 i n all ranks list=() names cpus
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  count=${#nodes[@]}
  if [[ $count != 1 && ${MASTER_ADDR:-} =~ ^(127\.|localhost) ]]; then
    fail "MASTER_ADDR is $MASTER_ADDR, where each node finds only itself: unset MASTER_ADDR"
  fi
  if in_a_step; then # in a shell of srun, which holds all that the job has
    overlap=(--overlap)
    unset SLURM_CPU_BIND
  fi
  # Ask the first node, for only there is it known which port is free.
  local -a ask=(--nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap)
  if [[ -n ${SLURM_GPUS:-} ]]; then # of all nodes together: ask each how many it has
    ask=(--nodes="$count" --ntasks="$count" --ntasks-per-node=1 "${overlap[@]}")
  fi
  first=$((20000 + (SLURM_JOB_ID * 97 + RANDOM) % 10000))
  here=$(srun_alone "${ask[@]}" "$script" --probe "$first" | sed -n 's/^probe: //p' | sort -n) ||
    fail "The first node, ${nodes[0]}, could not be asked for a free port: see above."
  read -r _ _ port address interface <<<"$here"
  gpus=$(cut -d ' ' -f 2 <<<"$here" | paste -s -d , -)
  [[ $gpus == *,* ]] || gpus+="(x$count)"
  choose_ranks "$count" "$gpus"
  ranks=("${all[@]}")
  expand "$SLURM_JOB_CPUS_PER_NODE"
  cpus=${SLURM_CPUS_PER_TASK:-${all[0]}} # for each rank: as many as it can have on every node
  for i in "${!nodes[@]}"; do
    most=$((ranks[i] > most ? ranks[i] : most))
    cpus=$((all[i] / ranks[i] < cpus ? all[i] / ranks[i] : cpus))
    for ((n = 0; n < ranks[i]; n++)); do list+=("${nodes[i]}"); done
  done
  if ((most * count == ${#list[@]})); then # as many on each
    ranks=("$most")
  fi
  if [[ -n $torchrun && $most != 1 && (-n ${SLURM_GPUS_PER_TASK:-} || ${SLURM_TRES_PER_TASK:-} == *gpu*) ]]; then
    fail "With --torchrun a node has one task, and --gpus-per-task gives it the GPUs of one rank. Ask with --gpus-per-node instead."
  fi
  export MASTER_PORT=${MASTER_PORT:-$port} RANKS_PER_NODE=${ranks[*]}
  echo "nodes: ${nodes[*]}, ranks on each: ${ranks[*]}, in all: ${#list[@]}"
  echo "meeting point: ${MASTER_ADDR:-$address}:$MASTER_PORT, interface ${GLOO_SOCKET_IFNAME:-${interface:--}}"
  echo "each rank: $cpus CPUs, $python, started by ${torchrun:-srun}"
  local -a command=(--kill-on-bad-exit=1 --input=none --quit-on-interrupt "${overlap[@]}")
  if [[ -n $torchrun ]]; then
    command+=(--nodes="$count" --ntasks="$count" --ntasks-per-node=1 --distribution=block)
    if [[ $SLURM_JOB_CPUS_PER_NODE != *,* ]]; then # otherwise each has all that there are on its node
      command+=(--cpus-per-task=$((cpus ? cpus * most : all[0])))
    fi
  else
    command+=(--ntasks="${#list[@]}" --cpus-per-task=$((cpus ? cpus : 1)))
    if [[ ${#ranks[@]} == 1 && $SLURM_JOB_CPUS_PER_NODE != *,* ]]; then
      command+=(--nodes="$count" --ntasks-per-node="$most" --distribution=block)
    else # Slurm might share them out in another way: name the node of each rank
      printf -v names '%s,' "${list[@]}"
      command+=(--nodelist="${names%,}" --distribution=arbitrary)
    fi
    if ((cpus == 0)); then # fewer CPUs than ranks
      command+=(--overcommit)
    fi
  fi
  command+=("$script" "${options[@]}" "$file" "$@")
  if [[ -n $dry_run ]]; then
    printf '%q ' srun "${command[@]}"
    echo
    return
  fi
  supervise srun_alone "${command[@]}"
}

# Run srun with nothing but the options given: it prefers what salloc or the site left behind.
srun_alone() {
  local name remove=()
  for name in SLURM_{NTASKS,NPROCS,NTASKS_PER_{NODE,GPU,TRES},CPUS_PER_{TASK,GPU},TRES_PER_TASK,EXACT,HINT} SRUN_CPUS_PER_TASK; do
    remove+=(-u "$name")
  done
  env "${remove[@]}" srun --export=ALL "$@"
}

# On a node: print its number, for how many ranks it has GPUs, a free port, address and interface.
probe() {
  local address=${MASTER_ADDR:-}
  count_gpus
  address=${address:-$(address_of "$SLURMD_NODENAME")}
  echo "probe: $SLURM_NODEID $((SLURM_GPUS_ON_NODE ? SLURM_GPUS_ON_NODE : 1)) $(free_port "$1") $address $(interface_to "$address")"
}

main() {
  local ranks wanted
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
      --torchrun) torchrun=torchrun options+=("$1") ;;
      --max-restarts)
        [[ ${2:-} =~ ^[0-9]+$ ]] || fail "--max-restarts wants a number: how often the ranks may be started again."
        torchrun=torchrun restarts=$2 options+=("$1" "$2")
        shift
        ;;
      --monitor) monitor=1 options+=("$1") ;;
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
    ranks=1
    if [[ $local == *x* ]]; then
      ranks=${local#*x}
    fi
    start_here "${local%x*}" "$ranks" "$@"
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
