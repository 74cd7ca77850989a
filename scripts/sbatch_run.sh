#!/usr/bin/env bash
# Trains with day2/13_train.py, or runs a lesson, as a batch job on several nodes. Before the first time, edit the lines #SBATCH
# below, and the function activate if your site needs it.
#
# Usage: sbatch [option of sbatch]... scripts/sbatch_run.sh [--doctor] [option]... [FILE [argument]...]
#   FILE       a path, the name of a lesson's file, or a lesson's number; without arguments: 13
#   --doctor   first check the nodes with scripts/doctor.sh; start nothing if a check fails
#   All other options go to scripts/multinode_setup_and_run.sh, such as --torchrun.
#   Options of sbatch override the lines #SBATCH: sbatch --nodes 4 scripts/sbatch_run.sh
#
# What the job prints, errors too, goes to logs/slurm-JOB.out, in the folder where you call sbatch.
#
# Shortly before the time limit Slurm warns this script, which warns the ranks. If the lesson then
# saves its state and stops, as lessons 12 and 13 do, the job goes back into the queue, and resumes when
# it starts again. So does a job that has lost a node.

# Who pays: replace <acc_name>_g with your account.
#SBATCH --account=<acc_name>_g
# The job's time limit, in hours, minutes, seconds: then Slurm kills it. Ask for less, wait less.
#SBATCH --time=00:30:00
# How many nodes.
#SBATCH --nodes=2
# Only nodes that your site has marked like this. Delete this line if it has no such mark.
#SBATCH --constraint=gpu
# GPUs of each node: 1 if nodes have one each. Delete this line if they have none.
#SBATCH --gpus-per-node=4
# Tasks of each node: as many ranks are started. One for each GPU: 4, or 1 on nodes with one GPU.
# Without GPUs, as many as share the cores well, such as 4.
#SBATCH --ntasks-per-node=4
# CPU cores for each task, as Slurm counts them. They also load the data.
#SBATCH --cpus-per-task=32
# The kind of queue, if your site wants one: remove the first #.
##SBATCH --qos=regular
##SBATCH --partition=main
# The name of the job in squeue.
#SBATCH --job-name=course
# Send USR1 to this script (B:) a minute before the time limit. Longer if a snapshot takes long.
#SBATCH --signal=B:USR1@60
# Start the job again when a node is lost. Delete this line if your code cannot resume.
#SBATCH --requeue
# Leave this: Slurm starts no job if the output's folder is missing. So Slurm writes no output, and
# this script makes logs/ itself.
#SBATCH --output=/dev/null

# Makes a Python with torch available on the nodes. You need nothing here if it is available where
# you call sbatch, or if it is the .venv of the course. Otherwise uncomment one line, and edit it.
activate() {
  : # module load pytorch
  : # source /path/to/environment/bin/activate
  : # source "$(conda info --base)/etc/profile.d/conda.sh" && conda activate course
}

# ---- Nothing below needs to be edited.

set -eo pipefail # no -u: modules and conda read variables that are not set

if [[ -z $SLURM_JOB_ID || $1 == -h || $1 == --help ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  [[ $1 == -h || $1 == --help ]]
  exit
fi

# Write a line with the time to the log.
say() {
  echo "== $(date '+%F %T') $1"
}

# Run a command once on each node of the job, beside the lesson.
on_each_node() (
  nodes=$SLURM_JOB_NUM_NODES
  # srun prefers to its options, or refuses, what is in the environment. So it only gets the job.
  for name in "${!SLURM_@}" "${!SRUN_@}"; do
    [[ $name =~ ^SLURM_(JOB_ID|CONF|WORKING_CLUSTER)$ ]] || unset "$name"
  done
  timeout 60 srun --overlap --nodes="$nodes" --ntasks="$nodes" --export=ALL "$@"
)

# Return whether a node does not answer. Slurm's own list of nodes may say so minutes later. An srun
# that is refused, or whose options are wrong, says nothing about nodes.
a_node_is_lost() {
  local words status=0
  words=$(on_each_node true 2>&1) || status=$?
  ((status)) || return 1
  echo "$words"
  ((status == 124)) || grep -E 'failed on node|[Nn]ode failure' <<<"$words" >/dev/null ||
    sinfo --noheader --nodes "$SLURM_JOB_NODELIST" --format %T | grep -E 'down|\*' >/dev/null
}

# Pass the warning on to the ranks. If Slurm tracks processes with control groups, its own signal
# reaches only what Slurm itself has started, which is the launcher. So signal all processes of the
# steps. Those without a handler ignore USR1, because the launcher does.
# shellcheck disable=SC2016 # the variables are the nodes'
warn_ranks() {
  on_each_node bash -c '
    scontrol listpids "$SLURM_JOB_ID" "$SLURMD_NODENAME" | while read -r pid _ step _; do
      if [[ $step =~ ^[0-9]+$ && $step != "$SLURM_STEP_ID" ]]; then
        kill -USR1 "$pid" || true
      fi
    done' || say "the ranks could not be warned"
}

# Told to stop, a rank that has saved its state ends with 75. Below torchrun, it only says so.
stopped_as_told() {
  tail -c "+$((begin + 1))" "$log" | grep '^Stopped as told' >/dev/null
}

# Slurm warns once, and a rank that is still importing torch ignores that. So warn it again.
keep_warning() {
  while kill -0 "$launcher" 2>/dev/null && ! stopped_as_told; do
    warn_ranks
    sleep 3
  done
}

mkdir -p logs
log=logs/slurm-$SLURM_JOB_ID.out
exec >>"$log" 2>&1 # the same file if Slurm starts the job again
begin=$(wc -c <"$log")
say "job $SLURM_JOB_ID, start $((SLURM_RESTART_COUNT + 1)), nodes $SLURM_JOB_NODELIST"
trap 'say "the job ends with exit status $?"' EXIT
signaled=1 warned='' launcher='' ending=''
trap 'signaled=1 warned=1; say "the time limit is near: warn the ranks"
  [[ -z $launcher ]] || keep_warning &' USR1

# Submitted from inside another job, this one has inherited its variables: in which step that shell
# was, and GPUs of tasks, though this job may not have asked for any.
job=$(scontrol show job "$SLURM_JOB_ID")
unset "${!SLURM_STEP@}" "${!SLURM_CPU_BIND@}"
[[ $job =~ TresPerTask=[^[:space:]]*gpu ]] || unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK

# Slurm runs a copy of this file. The job knows where the original is; its arguments follow.
original=$(sed -n 's/^ *Command=//p' <<<"$job")
while [[ ! -f $original && $original == *' '* ]]; do
  original=${original% *}
done
scripts=$(dirname "$original")
if [[ ! -x $scripts/multinode_setup_and_run.sh ]]; then
  say "$original is not in the folder scripts of the course: submit it from there"
  exit 1
fi

activate
say "environment: $(command -v python3 || echo no python3)"
if [[ $1 == --doctor ]]; then
  shift
  say "doctor"
  "$scripts/doctor.sh"
fi
# At the time limit, by scancel, and before it starts the job again, Slurm sends TERM to all.
trap 'signaled=1; ending=1; say "Slurm stops this job"' TERM
say "start: multinode_setup_and_run.sh ${*:-13}"
# In the background: while bash waits for a command in the foreground, it does not run traps.
"$scripts/multinode_setup_and_run.sh" "${@:-13}" &
launcher=$!
[[ -z $warned ]] || keep_warning &
while [[ $signaled ]]; do # once more if a signal has ended the wait, not the launcher
  signaled='' status=0
  wait "$launcher" || status=$?
done

if [[ $status == 0 ]] && stopped_as_told; then
  status=75
fi
if [[ -z $ending && $status == 75 ]]; then
  say "the lesson has saved its state and stopped: back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
  trap - EXIT TERM
  sleep 60 # Slurm stops this script now
elif [[ -z $ending && $status != 0 ]] && a_node_is_lost; then
  # To put the job back now would be wrong: until Slurm knows that the node is lost, it cannot free
  # the others properly. (Slurm 22.05 then counts their GPUs as used.)
  say "a node does not answer: wait until Slurm notices, and starts the job again"
  sleep 900 &
  wait "$!" || true
fi
exit "$status"
