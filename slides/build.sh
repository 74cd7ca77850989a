#!/usr/bin/env bash
# Builds the slides. For each deck: an HTML page, a PDF to project and to hand out, and a PDF with
# the notes for whoever teaches (day1.html, day1.pdf, day1-notes.pdf). And the cheat sheet of
# day1/CHEATSHEET.md on one page of A4 (cheatsheet.pdf).
#
# Usage: slides/build.sh [--html] [day1] [day2] [beyond] [cheatsheet]
#   --html   only the pages such as day1.html (P opens the speaker's view)
#   NAME     only these; all of them if none is named
#
# Needs npm, and chromium for the PDFs. Debian: apt-get install chromium nodejs npm
# fonts-dejavu-core fonts-liberation. The first run installs marp into slides/node_modules, at
# the versions in package-lock.json; later ones need no network.
# CHROME_PATH names another browser than chromium.
set -euo pipefail
export LC_ALL=C # so that figures/*.svg has the same order everywhere

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here"
fail() {
  echo "$1" >&2
  exit 1
}

html_only=''
decks=()
cheat_sheet=''
for argument in "$@"; do
  case $argument in
    -h | --help)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$here/build.sh"
      exit
      ;;
    --html) html_only=1 ;;
    day1 | day2 | beyond) decks+=("$argument") ;;
    cheatsheet) cheat_sheet=1 ;;
    -*) fail "There is no option $argument. See slides/build.sh --help" ;;
    *) fail "There is no deck $argument. See slides/build.sh --help" ;;
  esac
done
if [[ ${#decks[@]} == 0 && -z $cheat_sheet ]]; then
  decks=(day1 day2 beyond)
  cheat_sheet=1
fi

command -v npm >/dev/null || fail "There is no npm here. Install it: apt-get install nodejs npm"
CHROME_PATH=$(command -v "${CHROME_PATH:-chromium}" || true)
export CHROME_PATH
if [[ -z $html_only && -z $CHROME_PATH ]]; then
  fail "There is no chromium here for the PDFs. Install it: apt-get install chromium. Or: slides/build.sh --html"
fi
if ! cmp -s package-lock.json node_modules/made-from; then
  npm ci --no-audit --no-fund --loglevel=error
  cp package-lock.json node_modules/made-from
fi

marp=(node_modules/.bin/marp --no-stdin --allow-local-files)

# make_pdf FROM TO SOURCES [OPTION...]: the PDF says what it was made from, so that a test can tell
# when it is stale. SOURCES are the names of files, one a line.
make_pdf() {
  local sum
  sum=$(tr '\n' '\0' <<<"$3" | xargs -0 cat | sha256sum | cut -d ' ' -f 1)
  "${marp[@]}" --pdf --keywords "sources $sum" "${@:4}" "$1" -o "$2"
}

for deck in "${decks[@]}"; do
  # HTML stands beside the Markdown, because it shows the same figures.
  "${marp[@]}" "$deck.md"
  if [[ -n $html_only ]]; then
    continue
  fi
  sources=$(printf '%s\n' "$deck.md" theme.css marp.config.mjs package-lock.json figures/*.svg)
  make_pdf "$deck.md" "$deck.pdf" "$sources" --pdf-outlines
  make_pdf "$deck.md" "$deck-notes.pdf" "$sources" --pdf-outlines --pdf-notes
done
if [[ -n $cheat_sheet && -z $html_only ]]; then
  sources=$(printf '%s\n' ../day1/CHEATSHEET.md cheatsheet.css package-lock.json)
  make_pdf ../day1/CHEATSHEET.md cheatsheet.pdf "$sources" --theme cheatsheet
fi
