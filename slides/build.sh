#!/usr/bin/env bash
# Builds the slides: an HTML page and a PDF of each deck.
#
# Usage: slides/build.sh [--html]
#   --html   only the pages such as day1.html (P opens the speaker's view)
#
# Needs npm, and chromium for the PDFs. Debian: apt-get install chromium nodejs npm
# fonts-dejavu-core fonts-liberation. The first run installs marp into slides/node_modules, at
# the versions in package-lock.json; later ones need no network.
# CHROME_PATH names another browser than chromium.
set -euo pipefail
export LC_ALL=C # so that figures/*.svg has the same order everywhere

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here"
decks=(day1 day2 beyond)

fail() {
  echo "$1" >&2
  exit 1
}

html_only=''
case ${1:-} in
  -h | --help)
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$here/build.sh"
    exit
    ;;
  --html) html_only=1 ;;
  ?*) fail "There is no option $1. See slides/build.sh --help" ;;
esac

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
# HTML stands beside the Markdown, because it shows the same figures.
"${marp[@]}" "${decks[@]/%/.md}"
if [[ -n $html_only ]]; then
  exit
fi
for deck in "${decks[@]}"; do
  # The PDF says what it was made from, so that a test can tell when it is stale.
  sources=$(cat "$deck.md" theme.css package-lock.json figures/*.svg | sha256sum | cut -d ' ' -f 1)
  "${marp[@]}" --pdf --pdf-notes --pdf-outlines --keywords "sources $sources" "$deck.md" -o "$deck.pdf"
done
