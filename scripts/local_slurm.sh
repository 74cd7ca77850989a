#!/usr/bin/env bash
# A real Slurm cluster of several nodes on this one machine, to learn and to test with.
#
# Usage: scripts/local_slurm.sh COMMAND
#   up [N]                 start a cluster of N nodes (2)
#   shell [COMMAND...]     a shell, or COMMAND, on the login side of the cluster
#   link RATE              slow the network down: link 1gbit, link 100mbit
#   link off               full speed again
#   down                   stop everything and leave nothing behind
#
# It needs root, and packages of Debian or Ubuntu: apt-get install slurm-wlm munge iproute2
#
# Each node is a set of Linux namespaces: its own host name, network card, processes and /dev/shm;
# all nodes share the files of this machine, as on a cluster, and reach each other by name, but
# nothing outside. Each claims 128 cores and 4 GPUs, which need not exist: Slurm counts them and sets
# CUDA_VISIBLE_DEVICES.
# Any account and QOS is accepted. A job that is put back into the queue starts again after 10
# seconds, instead of Slurm's 2 minutes. No Slurm set-up of the machine is read or changed.
#
# Environment:
#   LOCAL_SLURM_DIR        where the cluster lives (/run/local-slurm); clusters in different folders
#                          run side by side
#   LOCAL_SLURM_SETTINGS   more lines for slurm.conf: LaunchParameters=use_interactive_step
#
# To lose a node: kill -9 "$(cat /run/local-slurm/node2.pid)". All that runs on it dies with it. The
# logs are in the same folder.
set -euo pipefail

subnet=10.77.0 # node I is $subnet.I; seen only inside the cluster
namespaces=(unshare --net --uts --ipc --mount --propagation slave --pid --fork --kill-child)
[[ ${1:-} == shell ]] || PATH+=:/usr/sbin:/sbin # where the daemons and tc are

die() {
  echo "local_slurm.sh: $*" >&2
  exit 1
}

[[ -d /proc/self ]] || die "Slurm needs Linux."
self=$(readlink -f "${BASH_SOURCE[0]}")
state=$(realpath -m -- "${LOCAL_SLURM_DIR:-/run/local-slurm}")
# Slurm reads no blanks in its settings, and the path of a Unix socket has room for 107 bytes.
[[ $state =~ ^/[A-Za-z0-9._/+-]{1,79}$ ]] ||
  die "The folder of the cluster must be a path of at most 80 letters, digits and ._/+-, not: $state"
mark=LOCAL_SLURM_CLUSTER=$state # in the environment of every process of this cluster

# The ids of the processes of this cluster: those with the mark, and the daemons of job steps,
# which overwrite their environment, but have the log of their node open for writing.
processes() {
  {
    grep -lszxF -- "$mark" /proc/[0-9]*/environ || true
    find /proc/[0-9]*/fd -perm -200 -lname "$state/node*.log" 2>/dev/null || true
  } | cut -d/ -f3 | sort -u
}

is_up() {
  local pid
  pid=$(cat "$state/login.pid" 2>/dev/null) && grep -qszxF -- "$mark" "/proc/$pid/environ"
}

need_cluster() {
  is_up || die "No cluster is up in $state: start one with scripts/local_slurm.sh up"
  # How to run a command on the login side.
  enter=(nsenter --target "$(<"$state/login.pid")" --net --uts --mount)
  enter+=(env "--chdir=$PWD" "SLURM_CONF=$state/slurm.conf" "$mark")
}

stop() {
  local pids
  for _ in {1..100}; do
    mapfile -t pids < <(processes)
    ((${#pids[@]})) || break
    kill -9 "${pids[@]}" 2>/dev/null || true
    sleep 0.1
  done
  ((${#pids[@]} == 0)) || die "These processes of the cluster cannot be stopped: ${pids[*]}"
  [[ ! -e $state/slurm.conf ]] || rm -rf "$state"
}

write_config() {
  local i cgroup=disabled
  (umask 077 && head -c 1024 /dev/urandom >"$state/munge.key")
  # Slurm numbers the GPUs by the names of device files: these are /dev/null.
  for i in {0..3}; do ln -s /dev/null "$state/gpu$i"; done
  echo "Name=gpu File=$state/gpu[0-3]" >"$state/gres.conf"
  # slurmd starts without control groups, even if it may not make any (23.02 can say so).
  [[ ! $(slurmd -V) =~ \ 2[0-2]\. ]] || cgroup=cgroup/v1
  echo "CgroupPlugin=$cgroup" >"$state/cgroup.conf"
  {
    echo "127.0.0.1 localhost"
    echo "::1 localhost ip6-localhost ip6-loopback"
    # The mapped addresses are for PyTorch, which looks up the name of every peer that way.
    printf "%s$subnet.254 login\n" "" ::ffff:
    for ((i = 1; i <= nodes; i++)); do
      printf "%s$subnet.$i node$i\n" "" ::ffff:
    done
  } >"$state/hosts"
  cat >"$state/slurm.conf" <<END
ClusterName=local
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$state/munge.socket,cred_expire=10
StateSaveLocation=$state/slurmctld
SlurmctldPidFile=$state/slurmctld/pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdSpoolDir=$state/%n
SlurmdPidFile=$state/%n/pid
SlurmdLogFile=$state/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=10
KillWait=5
GresTypes=gpu
EnforcePartLimits=ALL
NodeName=DEFAULT CPUs=128 RealMemory=256000 Gres=gpu:4 Feature=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=24:00:00 State=UP
${LOCAL_SLURM_SETTINGS:-}
END
  for ((i = 1; i <= nodes; i++)); do
    mkdir "$state/node$i"
    echo "NodeName=node$i NodeAddr=$subnet.$i" >>"$state/slurm.conf"
  done
}

# The first process of the cluster: starts all others, and they die with it.
run_login() {
  local i
  hostname login
  mount --bind "$state/hosts" /etc/hosts
  touch "$state/login.net"
  mount --bind /proc/self/ns/net "$state/login.net"
  ip link set lo up
  ip link add bridge type bridge
  ip address add "$subnet.254/24" dev bridge
  ip link set bridge up
  munged --force --socket="$state/munge.socket" --key-file="$state/munge.key" \
    --pid-file="$state/munge.pid" --log-file="$state/munge.log" --seed-file="$state/munge.seed"
  slurmctld -D -c &
  for ((i = 1; i <= nodes; i++)); do
    ( # the process id that the machine knows it by, not the one in this namespace
      read -r pid _ </proc/self/stat
      echo "$pid" >"$state/node$i.pid"
      exec "${namespaces[@]}" --mount-proc bash "$self" _node "$i"
    ) &
  done
  wait
}

# The first process of node $1.
run_node() {
  hostname "node$1"
  mount -t tmpfs -o size=25%,mode=1777 tmpfs /dev/shm
  ip link set lo up
  ip link add eth0 type veth peer name "node$1" netns "$state/login.net"
  nsenter --net="$state/login.net" ip link set "node$1" master bridge up
  ip address add "$subnet.$1/24" dev eth0
  ip link set eth0 up
  slurmd -D -N "node$1" &
  wait
}

up() {
  local test='ip link add bridge type bridge && ip link add eth0 type veth peer name node1'
  nodes=${1:-2}
  [[ $nodes =~ ^([1-9]|[12][0-9]|3[0-2])$ ]] || die "The number of nodes must be 1 to 32, not: $nodes"
  type slurmctld slurmd sinfo munged >/dev/null 2>&1 ||
    die "Slurm is not installed: apt-get install slurm-wlm munge iproute2 (as root)"
  ((EUID == 0)) || die "Only root can make network namespaces: run this as root."
  "${namespaces[@]}" --mount-proc sh -c "$test" 2>/dev/null ||
    die "This system does not let us make network namespaces. A container needs --privileged for them."
  [[ -z $(processes) ]] ||
    die "A cluster is already up in $state: stop it first with scripts/local_slurm.sh down"
  stop # what a crash has left
  umask 022
  mkdir -p "$state"
  [[ -O $state && -z $(ls -A "$state") ]] ||
    die "$state holds other files or belongs to someone else: set LOCAL_SLURM_DIR."
  trap 'tail -n 5 "$state/log" >&2 || true; stop; die "The cluster did not start."' EXIT
  touch "$state/slurm.conf"
  mkdir "$state/slurmctld"
  write_config

  env "$mark" SLURM_CONF="$state/slurm.conf" setsid "${namespaces[@]}" \
    bash "$self" _login "$nodes" </dev/null >"$state/log" 2>&1 &
  echo $! >"$state/login.pid"
  disown
  SECONDS=0
  until sleep 0.2 && is_up && need_cluster &&
    [[ $("${enter[@]}" timeout 1 sinfo -ho '%D %T' 2>/dev/null) == "$nodes idle" ]]; do
    ((SECONDS < 30)) && kill -0 $! 2>/dev/null || exit 1
  done
  trap - EXIT
  cat <<END
A Slurm cluster is up: $nodes nodes, each with 128 cores and 4 GPUs as far as Slurm knows.
  scripts/local_slurm.sh shell    opens a shell on it; there, for example:
    salloc --nodes $nodes --ntasks-per-node=4 --cpus-per-task=32 --constraint gpu --gpus-per-node 4
    srun hostname
  scripts/local_slurm.sh down     stops it
END
}

link() {
  local rate=${1:-} node port card limit
  [[ $rate == off || $rate =~ ^[1-9][0-9]*(\.[0-9]+)?[kmg]bit$ ]] ||
    die "RATE must be a number with kbit, mbit or gbit, such as 100mbit, or off."
  need_cluster
  limit=(root tbf rate "$rate" burst 128k latency 50ms)
  for node in $(cd "$state" && ls node*.pid); do
    node=${node%.pid}
    port=("${enter[@]}" tc qdisc) # what goes to the node, and what comes from it
    card=(nsenter --target "$(<"$state/$node.pid")" --net tc qdisc)
    "${port[@]}" delete dev "$node" root 2>/dev/null || true
    "${card[@]}" delete dev eth0 root 2>/dev/null || true
    [[ $rate != off ]] || continue
    "${port[@]}" add dev "$node" "${limit[@]}"
    "${card[@]}" add dev eth0 "${limit[@]}"
  done
  [[ $rate != off ]] || rate='full speed'
  echo "Link between the nodes: $rate"
}

case ${1:-} in
  -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$self" ;;
  up) up "${@:2}" ;;
  shell)
    need_cluster
    shift
    (($#)) || set -- "${SHELL:-/bin/bash}"
    exec "${enter[@]}" "$@"
    ;;
  link) link "${@:2}" ;;
  down)
    [[ ${LOCAL_SLURM_CLUSTER:-} != "$state" ]] || die "Leave the shell of the cluster first."
    stop
    ;;
  _login) nodes=$2 && run_login ;;
  _node) run_node "$2" ;;
  *) die "Name a command: see scripts/local_slurm.sh --help" ;;
esac
