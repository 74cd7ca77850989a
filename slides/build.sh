#!/usr/bin/env bash
# Builds the slides. For each deck: an HTML page, a PDF to project and to hand out, and a PDF with
# the notes for whoever teaches (day1.html, day1.pdf, day1-notes.pdf). And the cheat sheet of
# day1/CHEATSHEET.md on two sides of A4 (cheatsheet.pdf).
#
# Usage: slides/build.sh [--html] [day1] [day2] [beyond] [cheatsheet]
#   --html  only the pages such as day1.html (P opens the speaker's view)
#   NAME    only these; all of them if none is named
#
# Needs npm, and chromium for the PDFs. Debian: apt-get install chromium nodejs npm
# fonts-dejavu-core fonts-liberation. The first run installs marp into slides/node_modules, at
# the versions in package-lock.json; later ones need no network.
# CHROME_PATH names another browser than chromium.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
fail() {
  echo "$1" >&2
  exit 1
}

pdfs=true
names=()
for argument in "$@"; do
  case $argument in
    -h | --help)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' build.sh
      exit
      ;;
    --html) pdfs=false ;;
    day1 | day2 | beyond | cheatsheet) names+=("$argument") ;;
    *) fail "There is no option or deck $argument. See slides/build.sh --help" ;;
  esac
done
((${#names[@]})) || names=(day1 day2 beyond cheatsheet)

command -v npm >/dev/null || fail "There is no npm here. Install it: apt-get install nodejs npm"
CHROME_PATH=$(command -v "${CHROME_PATH:-chromium}" || true)
export CHROME_PATH
if $pdfs && [[ -z $CHROME_PATH ]]; then
  fail "There is no chromium here for the PDFs. Install it: apt-get install chromium. Or: slides/build.sh --html"
fi
if ! cmp -s package-lock.json node_modules/made-from; then
  npm ci --no-audit --no-fund --loglevel=error
  cp package-lock.json node_modules/made-from
fi

marp=(node_modules/.bin/marp --no-stdin --allow-local-files)
pdf=("${marp[@]}" --pdf)
for name in "${names[@]}"; do
  if [[ $name == cheatsheet ]]; then
    ! $pdfs || "${pdf[@]}" --theme cheatsheet ../day1/CHEATSHEET.md -o cheatsheet.pdf
    continue
  fi
  # HTML is beside the Markdown, because it shows the same figures.
  "${marp[@]}" "$name.md"
  if $pdfs; then
    "${pdf[@]}" --pdf-outlines "$name.md" -o "$name.pdf"
    "${pdf[@]}" --pdf-outlines --pdf-notes "$name.md" -o "$name-notes.pdf"
  fi
done
