#!/usr/bin/env bash
# Builds the slides. For each deck: an HTML page, a PDF to project and to hand out, and a PDF with
# the notes for whoever teaches (day1.html, day1.pdf, day1-notes.pdf). And the cheat sheet of
# day1/CHEATSHEET.md on two sides of A4 (cheatsheet.pdf). Says what it makes, one line a file.
#
# Usage: slides/build.sh [html|pdf] [--for SETTING] [--timetable NAME] [DECK...]
#   html              only the pages such as day1.html (P opens the speaker's view); also --html
#   pdf               only the PDFs
#   --for SETTING     where the class works: laptop (if not said), cluster, cloud. A cluster's own
#                     words come from slides/site.txt.
#   --timetable NAME  a timetable's decks, and the cheat sheet: half-day, two-days, sharding
#   DECK              day1, day2, beyond, half-day, sharding, cheatsheet; all if none is named
#
# Needs npm, python3 and, for the PDFs, chromium. Debian: apt-get install chromium nodejs npm
# fonts-dejavu-core fonts-liberation. The first run installs marp into slides/node_modules, at
# the versions in package-lock.json; later ones need no network.
# CHROME_PATH names another browser than chromium.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
fail() {
  echo "$1" >&2
  exit 1
}

kinds=(html pdf notes)
setting=laptop
decks=()
while (($#)); do
  argument=$1
  shift
  case $argument in
    -h | --help)
      sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' build.sh
      exit
      ;;
    html | --html) kinds=(html) ;;
    pdf) kinds=(pdf notes) ;;
    --for)
      setting=${1:-}
      [[ $setting =~ ^(laptop|cluster|cloud)$ ]] || fail "--for wants laptop, cluster or cloud."
      shift
      ;;
    --timetable)
      case ${1:-} in
        half-day) decks+=(half-day cheatsheet) ;;
        two-days) decks+=(day1 day2 cheatsheet) ;;
        sharding) decks+=(day1 sharding cheatsheet) ;;
        *) fail "--timetable wants half-day, two-days or sharding." ;;
      esac
      shift
      ;;
    day1 | day2 | beyond | half-day | sharding | cheatsheet) decks+=("$argument") ;;
    *) fail "There is no option or deck $argument. See slides/build.sh --help" ;;
  esac
done
((${#decks[@]})) || decks=(day1 day2 beyond half-day sharding cheatsheet)

lacks=()
for program in npm python3; do
  command -v "$program" >/dev/null || lacks+=("$program")
done
CHROME_PATH=$(command -v "${CHROME_PATH:-chromium}" || true)
export CHROME_PATH
[[ ${kinds[*]} != *pdf* || -n $CHROME_PATH ]] || lacks+=(chromium)
if ((${#lacks[@]})); then
  fail "This machine lacks ${lacks[*]}. Debian: apt-get install ${lacks[*]}. Without chromium: slides/build.sh html"
fi
# All decks are written before one is built: a word that is missing shows at once.
trap 'rm -f .*.built.md log' EXIT
for deck in "${decks[@]}"; do
  [[ $deck == cheatsheet ]] || python3 deck.py "$deck" "$setting" >".$deck.built.md"
done
if ! cmp -s package-lock.json node_modules/made-from; then
  echo "installing marp into slides/node_modules, once"
  npm ci --no-audit --no-fund --loglevel=error
  cp package-lock.json node_modules/made-from
fi

# make FILE OPTIONS...: makes a file, and says so.
made=0
make() {
  made=$((made + 1))
  echo "[$made/$all] slides/$1"
  node_modules/.bin/marp --no-stdin --allow-local-files -o "$@" 2>log || fail "$(cat log)"
}
all=0
for deck in "${decks[@]}"; do
  if [[ $deck != cheatsheet ]]; then
    all=$((all + ${#kinds[@]}))
  elif [[ ${kinds[*]} == *pdf* ]]; then
    all=$((all + 1))
  fi
done
for deck in "${decks[@]}"; do
  if [[ $deck == cheatsheet ]]; then
    [[ ${kinds[*]} != *pdf* ]] || make cheatsheet.pdf --pdf --theme cheatsheet ../day1/CHEATSHEET.md
    continue
  fi
  # HTML is beside the Markdown, because it shows the same figures.
  for kind in "${kinds[@]}"; do
    case $kind in
      html) make "$deck.html" ".$deck.built.md" ;;
      pdf) make "$deck.pdf" --pdf --pdf-outlines ".$deck.built.md" ;;
      notes) make "$deck-notes.pdf" --pdf --pdf-outlines --pdf-notes ".$deck.built.md" ;;
    esac
  done
done
