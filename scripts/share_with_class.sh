#!/usr/bin/env bash
# Makes the course and its environment once for a whole class, on a disk that all its machines see.
#
# Usage: scripts/share_with_class.sh FOLDER
#
# FOLDER gets a clone of this repository with a .venv, which everyone can read, and only you can
# change, and course.bundle, from which people clone: git clones no folder that belongs to others.
# Then lesson 0 runs as a participant would run it, and must write nothing into FOLDER. At the end
# come the three lines for your first slide.
# If a site module with PyTorch is loaded, the environment keeps that PyTorch, and participants load
# the same module first. Type the same command again after you have changed something.
set -euo pipefail

die() {
  echo "share_with_class.sh: $*" >&2
  exit 1
}

if [[ $# != 1 || $1 == -* ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit "$([[ ${1:-} == -h || ${1:-} == --help ]] && echo 0 || echo 2)"
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
umask 022 # what is written from here on can be read by everyone
mkdir -p "$1" || die "name a folder that you can write to"
shared=$(cd "$1" && pwd -P)
[[ -O $shared ]] || die "$shared belongs to someone else"
path=$shared changed_by=only\ you
until [[ $path == / ]]; do # who may write to a parent can put a different folder there
  path=$(dirname "$path")
  mode=$(stat -c %A "$path")
  [[ $mode != *wx ]] || die "everyone can put a different folder there, in $path: choose another FOLDER"
  [[ $mode != ?????w* || $mode == *t ]] ||
    changed_by="you and the group $(stat -c %G "$path"), which can write to $path,"
done
course=$shared/course
if [[ -e $course ]]; then
  git -C "$course" pull --quiet --ff-only || die "$course is there, and is no clone of $root"
else
  git clone --quiet "$root" "$course"
fi
git -C "$course" bundle create --quiet "$shared/course.bundle" HEAD --branches
"${PYTHON:-python3}" "$course/scripts/environment.py" -- -c ''

python=$("${PYTHON:-python3}" "$course/scripts/environment.py" --which)
activate="source $(printf %q "$course/.venv/bin/activate")"
if [[ $python == "$course"/* ]]; then
  # Nobody else can write what Python compiles. A package may have templates, which it can't.
  "$python" -m compileall -q "$course/.venv" >/dev/null || true
else # a module has everything
  activate="module load <as you did>"
fi
torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
for path in "$shared/course.bundle" "$python" "$torch"; do
  until [[ $path == / ]]; do # a path can be read if everyone may pass each of its folders
    path=$(dirname "$(readlink -f "$path")")
    [[ $(stat -c %A "$path") == *[xt] ]] || die "participants can't enter $path: chmod a+rx there"
  done
done
open=$(find "$shared" -perm /022 ! -type l -print -quit)
[[ -z $open ]] || die "others can change $open: chmod go-w"

own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
touch "$own/before"
git clone --quiet "$shared/course.bundle" "$own/course"
(cd "$own/course" && HOME=$own "$python" day1/0_torch_dist.py 2 >"$own/output" 2>&1) ||
  die "lesson 0 fails for a participant: $(tail -n 5 "$own/output")"
written=$(find "$shared" -newer "$own/before" -print -quit)
[[ -z $written ]] || die "a participant's run wrote $written"
tail -n 1 "$own/output"
echo "Everyone can use it, and $changed_by can change it. For your first slide:"
printf '\n  git clone %q course\n  %s\n  cd course\n' "$shared/course.bundle" "$activate"
