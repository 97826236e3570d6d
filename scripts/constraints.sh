#!/usr/bin/env bash
# Writes constraints.txt: the newest version of everything that the project installs, by name.
set -euo pipefail
cd "$(dirname "$0")/.."

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"${PYTHON:-python3}" -m venv "$fresh/venv"
pip=("$fresh/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -qq --upgrade pip
"${pip[@]}" install -qq --group test --group check --group docs --group servers '.[all]'

{
    printf '# Every version that the project is tested with; written by `make constraints`.\n'
    "${pip[@]}" freeze --all --exclude semel --exclude setuptools | LC_ALL=C sort -f
} >constraints.txt
