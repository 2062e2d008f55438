# Functions that the install scripts share; sourced, not run.
# shellcheck shell=sh

say() { printf '%s\n' "$*" >&2; }

# make_venv PYTHON DIR: a virtual environment, unless DIR is one; `uv_pip` then installs into it.
# uv is taken from PATH, else from PyPI: pip cannot override what a package asks for, and needs minutes.
make_venv() {
    if ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        say "Python 3.11 or newer is needed, but '$1' is $("$1" --version 2>&1 || echo missing)."
        say "Name another one: PYTHON=/path/to/python3.12"
        exit 1
    fi
    venv_python=$2/bin/python
    if command -v uv >/dev/null 2>&1; then
        [ -x "$venv_python" ] || uv venv --quiet --python "$1" "$2"
        uv=uv
        return
    fi
    # It may be half-made, or uv made it without pip and is gone.
    if ! "$venv_python" -c 'import pip' 2>/dev/null && ! "$1" -m venv "$2"; then
        say "'$1 -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
        exit 1
    fi
    "$venv_python" -m pip install --quiet --disable-pip-version-check uv
    uv=$2/bin/uv
}

# uv_pip ARGS...: `uv pip install` into the environment made last. uv does not read pip's settings: those that
# are in the environment are passed on.
uv_pip() {
    export UV_LINK_MODE="${UV_LINK_MODE:-copy}" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"
    [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
    [ -z "${PIP_NO_CACHE_DIR:-}" ] || export UV_NO_CACHE=1
    for place in ${PIP_FIND_LINKS:-}; do
        case $place in
            *://*) ;;
            *) [ -d "$place" ] || continue ;;
        esac
        set -- --find-links "$place" "$@"
    done
    for index in ${PIP_EXTRA_INDEX_URL:-}; do set -- --extra-index-url "$index" "$@"; done
    # As pip chooses: the best version of all indexes, not of the first that knows the name.
    "$uv" pip install --quiet --python "$venv_python" --index-strategy unsafe-best-match \
        ${PIP_INDEX_URL:+--index-url "$PIP_INDEX_URL"} "$@"
}
