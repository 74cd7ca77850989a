#!/usr/bin/env bash
# Runs tests as on a machine that has little more than Python. What it lacks must be skipped, and
# nothing may fail.
#
# Usage: tests/bare.sh [pytest arguments]
#   tests/bare.sh                  a part of the tests that takes two to three minutes
#   tests/bare.sh -k test_traces   those whose name matches instead
#
# The setting: a copy of the repository, without git, in a path with a space. An ordinary user
# (nobody, if root starts this) who has no home folder. In PATH only the basic commands, so no git,
# Slurm, browser, npm, poppler, ip, ps, vmstat or unshare. Of all variables only LC_ALL=C, PATH,
# PYTHON and TMPDIR. SIGHUP, SIGINT, SIGQUIT and SIGPIPE ignored, as by nohup in the background of a
# script; standard input closed; no terminal; umask 077.
#
# Fails if a test fails, if none runs, or if none is skipped: then the setting is not the one meant.
set -euo pipefail

self=$(readlink -f "${BASH_SOURCE[0]}")
root=$(dirname "$(dirname "$self")")
commands=(
  bash sh sed grep find xargs diff cmp tar gzip hostname
  base64 basename cat chmod comm cp cut date df dirname du echo env expr false head id kill ln ls
  md5sum mkdir mktemp mv nice nohup nproc paste printf pwd readlink realpath rm rmdir seq sha256sum
  sleep sort split stat tail tee timeout touch tr true tty uname uniq wc whoami
)
# The folders from which Python loads, outer ones before those in them.
list_folders='
import os, sys
folders = {sys.prefix, sys.base_prefix, *sys.path[1:]}
print(*sorted(folder for folder in folders if os.path.isdir(folder)), sep="\n")'
# The tests in which something may be skipped, with some of each kind that run here.
part='
  (test_scripts and not bare_part) or test_masks or test_doctor or test_slides or test_tensorboard or test_traces
  or test_catalogue or test_use or slurm or slow_link or Ctrl or ctrl_c or cut_off
  or test_launcher or test_lesson_9 or (test_lesson_10 and two_nodes) or a_run_ends or lesson_8_runs
  or (test_readme and (quick or cluster or guide or hang or shell_say or torch_say or starts))
  or test_jobs or (test_data and (INT or no_room or cannot or shared_memory))
  or (test_network and (node or link))
  or (test_processes and node) or (test_exercises and stopped) or (test_environment and gets_only)'

fail() {
  echo "tests/bare.sh: $1" >&2
  exit 1
}

# Let the user enter folders that lie in a closed one, such as /root/.pyenv. For the processes of
# this script only, the closed one then holds nothing else.
open_folders() {
  local folder outer closed place inside=''
  for folder in "$@"; do
    closed='' outer=$folder
    while [[ $outer != / ]]; do
      "${as_user[@]}" test -x "$outer" || closed=$outer
      outer=$(dirname "$outer")
    done
    [[ -n $closed ]] || continue
    [[ $closed != "$folder" ]] || fail "Python loads from $folder, which is root's alone."
    if [[ -d $closed ]]; then
      place=$closed
      exec {inside}<"$place"
      mount -t tmpfs -o mode=755 tmpfs "$place"
    fi
    mkdir -p "$folder"
    mount --no-canonicalize --bind "/proc/$$/fd/$inside/${folder#"$place"/}" "$folder"
  done
  [[ -z $inside ]] || exec {inside}<&-
}

# shellcheck disable=SC2329 # it is called, in a trap
clean_up() {
  local process
  # Whatever the tests have started has that PATH.
  { grep -lsF "$work/bin" /proc/[0-9]*/environ || true; } | cut -d/ -f3 |
    while read -r process; do
      kill -KILL "$process" 2>/dev/null || true
    done
  rm -rf "$work"
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$self"
  exit
fi
# shellcheck source=scripts/course/environment.sh
source "$root/scripts/course/environment.sh"
make_environment "$root" "$root/tests/requirements.txt"
python=$(command -v "$python")

as_user=(env)
if ((EUID == 0)); then
  # By way of env, for setpriv itself may still enter every folder.
  as_user=(setpriv --reuid="$(id -u nobody)" --regid="$(id -g nobody)" --clear-groups env)
  if [[ -n ${BARE_INSIDE:-} ]]; then
    mapfile -t folders < <("$python" -c "$list_folders")
    open_folders "${folders[@]}"
  elif ! "${as_user[@]}" "$python" -c 'import torch' 2>/dev/null; then
    BARE_INSIDE=1 exec unshare --mount --propagation private "$self" "$@"
  fi
fi
"${as_user[@]}" "$python" -c 'import torch' || fail "An ordinary user cannot use $python."

work=$(mktemp -d /tmp/bare.XXXXXX)
trap clean_up EXIT
trap 'exit 130' INT TERM
copy="$work/my course"
mkdir "$work/bin" "$work/tmp" "$copy"
for command in "${commands[@]}"; do
  ln -s "$(type -P "$command" || fail "There is no $command here.")" "$work/bin/$command"
done
cd "$root"
if git rev-parse 2>/dev/null; then
  git ls-files -z --cached --others --exclude-standard
else
  find . -name .venv -prune -o -type f -print0
fi | tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory="$copy"
((EUID)) || chown -R nobody: "$work"

run_tests() (
  cd "$copy"
  trap '' HUP INT PIPE QUIT
  umask 077
  exec setsid --wait "${as_user[@]}" --ignore-environment \
    LC_ALL=C PATH="$work/bin" PYTHON="$python" TMPDIR="$work/tmp" \
    bash scripts/run_tests.sh -k "${part//$'\n'/ }" "$@" <&- 2>&1
)
# In the background, so that Ctrl-C ends this script at once.
{ run_tests "$@" | tee "$work/output"; } &
wait $! || fail "A test failed, or the tests did not run to their end."
for word in passed skipped; do
  tail -n 1 "$work/output" | grep -q " [1-9][0-9]* $word" || fail "No test has $word."
done
