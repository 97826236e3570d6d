#!/usr/bin/env bash
# Makes a virtual environment with semel, all its extras and every tool of the project.
#
#   scripts/setup.sh VENV             PYTHON=... chooses the interpreter of a new environment
#   scripts/setup.sh VENV GROUP...    with these groups of pyproject.toml in place of the tools
#   LOWEST=FILE scripts/setup.sh ...  with the versions in FILE where it has one
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
groups=("${@:2}")
[ ${#groups[@]} -gt 0 ] || groups=(test check docs package)

say() { printf '%s\n' "$*" >&2; }

# Asked by running it: a version manager's shim may be on PATH and still lead nowhere.
works() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if works "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "semel needs Python 3.11 or newer; none of these is one: ${PYTHON:-python3.13, python3.12, python3.11, python3}."
    say "Install it, or name it: make PYTHON=/path/to/python3.12 ..."
    return 1
}

make_environment() {
    local python=$1 version
    "$python" -m venv --clear "$venv" && return
    # Debian and Ubuntu keep the module venv in a package of its own.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        version=$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
        say "Installing python$version-venv ..."
        apt-get update -qq && apt-get install -y -qq "python$version-venv" >/dev/null
        "$python" -m venv --clear "$venv" && return
    fi
    say "The environment could not be made: see the message of $python above."
    return 1
}

if ! works "$venv/bin/python"; then
    python=$(find_python)
    say "Making $venv with $python ..."
    make_environment "$python"
fi

constraints=$venv/constraints.txt
# A package may be constrained once only: what LOWEST names is left out of the other file.
awk -F== '
    function name(text) { text = tolower(text); gsub(/[-_.]+/, "-", text); return text }
    !/^[^#]*==/ || name($1) in seen { next }
    FILENAME == lowest { seen[name($1)] = 1 }
    { print }
' lowest="${LOWEST:-}" ${LOWEST:+"$LOWEST"} constraints.txt >"$constraints"

pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$constraints")

say "Installing semel and its tools (${groups[*]}) into $venv ..."
"${pip[@]}" 'pip>=25.3'  # first, because older ones do not know dependency groups
"${pip[@]}" --build-constraint "$constraints" "${groups[@]/#/--group=}" --editable '.[all]'
