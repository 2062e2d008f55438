#!/bin/sh
# environment.sh PYTHON VENV [GROUP...]: a virtual environment with Burstline (editable) and dependency groups,
# by uv where it is installed, else by venv and pip.
set -eu
. "$(dirname "$0")/virtualenv.sh"
python=$1 venv=$2
shift 2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Burstline needs Python 3.11 or newer, but '$python' is $("$python" --version 2>&1 || echo missing)." >&2
    echo "Name another one: make run PYTHON=/path/to/python3.12" >&2
    exit 1
fi

groups=
for group in "$@"; do groups="$groups --group $group"; done
echo "Installing Burstline${groups:+ with$groups} into $venv (once)"

# A half-made environment is made again, and so is one that uv made without pip where uv is gone.
needs=pip
command -v uv >/dev/null 2>&1 && needs=encodings
if [ -e "$venv/pyvenv.cfg" ] && ! "$venv/bin/python" -c "import $needs" 2>/dev/null; then rm -rf "$venv"; fi

if command -v uv >/dev/null 2>&1; then
    make_venv "$python" "$venv"
    # shellcheck disable=SC2086
    uv_pip --editable . $groups
else
    # Debian and Ubuntu have it in a package of its own, and say so in nine lines.
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        echo "'$python -m venv' cannot work here; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
    if [ ! -x "$venv/bin/python" ] && ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        exit 1
    fi
    # Dependency groups came with pip 25.1.
    "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --quiet --editable . $groups
fi
