#!/usr/bin/env bash
# Builds the web site, with the decks, into runs/site. It changes the pages: only in a fresh clone.
#
# Usage: .ci/site.sh
#
# Needs npm and zensical (0.0.73 hangs where .venv is beside the pages).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if (($#)) || [[ -e .venv || -n $(git status --porcelain) ]]; then
  echo "It changes the pages, so it only runs in a fresh clone, and takes no options." >&2
  exit 1
fi
slides/build.sh html
# Markdown in folded blocks is Markdown, as on GitHub. A site has no files whose names begin with a
# dot. And links to a deck lead to its slides, not to their source.
git ls-files -z '*.md' | xargs -0 sed -Ei \
  -e 's/<details/& markdown="1"/' \
  -e 's/\[([^]]*)\]\(\.\.\/\.\w[^)]*\)/\1/g' \
  -e 's/(\]\([^) ]*(day[12]|beyond|half-day|sharding))\.md/\1.html/g'
zensical build --config-file .zensical.toml
