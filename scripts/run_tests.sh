#!/usr/bin/env bash
# Runs the tests of the course.
#
# Usage: scripts/run_tests.sh [pytest arguments]
#   scripts/run_tests.sh                 all of them
#   scripts/run_tests.sh -k lesson_4     those whose name matches
#
# Makes .venv first where the active Python lacks the packages of requirements.txt.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit
fi
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"
make_environment "$root"
cd "$root"
exec "$python" -m pytest -c tests/pytest.ini tests "$@"
