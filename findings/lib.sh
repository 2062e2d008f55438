# What the findings share; sourced, not run. A finding calls `needs`, then gives a Python program to `check`.
# shellcheck shell=sh
set -eu

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/virtualenv.sh
. "$here/../scripts/virtualenv.sh"
work=$(mktemp -d)
stage=install

# Exit status: 0 as described, 1 changed, 2 could not be tried.
finish() {
    status=$?
    trap - EXIT
    rm -rf "$work"
    if [ "$status" -ne 0 ] && [ "$stage" = install ]; then
        say "The packages could not be installed."
        status=2
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 2' HUP INT TERM

# needs NAME==VERSION...: a new environment with these packages. Other versions replace some of them:
# WITH='NAME==VERSION ...' sh FINDING.sh
needs() {
    make_venv "${PYTHON:-python3}" "$work/venv"
    uv_pip --no-compile-bytecode "$@" # most of it is never imported
    # shellcheck disable=SC2086
    [ -z "${WITH:-}" ] || uv_pip --no-compile-bytecode $WITH
    stage=check
}

# check: runs the program on standard input in an empty folder, for 300 seconds at most.
check() {
    mkdir "$work/folder"
    cd "$work/folder"
    ended=0
    DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 NO_PROXY=127.0.0.1 PYTHONPYCACHEPREFIX="$work/pycache" PYTHONPATH="$here" \
        timeout -k 5 300 "$work/venv/bin/python" -W ignore - || ended=$?
    case $ended in
        124 | 137)
            say "The program did not end within 300 seconds."
            return 2
            ;;
    esac
    return "$ended"
}
