#!/usr/bin/env bash
# Writes constraints.txt: the newest version of everything that the project installs, by name.
#
# Run it with the oldest Python at hand, down to the micro version (Debian 12 has 3.11.2): a newer
# one would pin what the older cannot install.   PYTHON=/usr/bin/python3.11 make constraints
set -euo pipefail
cd "$(dirname "$0")/.."

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"${PYTHON:-python3.11}" -m venv "$fresh/venv"
pip=("$fresh/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -qq --upgrade pip
"${pip[@]}" install -qq --group test --group check --group docs --group package --group bench --group servers '.[all]'

{
    printf '# Every version that the project is tested with; written by `make constraints`.\n'
    "${pip[@]}" freeze --all --exclude semel --exclude setuptools | LC_ALL=C sort -f
} >constraints.txt
