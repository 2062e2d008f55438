#!/bin/sh
# Certifies every load generator that is installed, each by its row of tools.toml, in turn (Linux, a quiet machine):
#
#   sh tests/bench/certify_all.sh DIR OUT        DIR as peers_env.sh made it; OUT gets a folder per certificate
#
# Then it prints a table of medians. REPEATS (3), LOADS (100 1000) and TOOLS choose fewer.
set -eu

[ $# -eq 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
ours=$(command -v burstline) || { echo "burstline is not on the PATH" >&2; exit 2; }

certify() { # TOOL LOAD K
    case $2 in
    100) flags="--requests 100 --prompt-tokens 512 --output-tokens 200" ;;
    1000) flags="--requests 1000 --prompt-tokens 512 --output-tokens 128" ;;
    *) echo "LOADS: $2: expected 100 or 1000" >&2; exit 2 ;;
    esac
    name=$1 folder=$out/$1-$2-$3
    case $1 in
    vllm) client="vllm bench serve" ;;
    sglang) client="SGLang bench_serving" ;;
    *) client=$1 ;;
    esac
    [ "$1" = burstline ] && set -- || set -- --client "$client"
    # Exit code 4 says that there are findings.
    PATH=$dir/$name/bin:$dir/$name/node_modules/.bin:$PATH "$ours" certify $flags "$@" --out "$folder" \
        >"$folder.txt" 2>&1 || [ $? -eq 4 ] || { echo "$name: see $folder.txt" >&2; missing=1; }
}

missing=0
for k in $(seq "${REPEATS:-3}"); do
    for load in ${LOADS:-100 1000}; do
        for tool in ${TOOLS:-burstline $(ls "$dir")}; do
            certify "$tool" "$load" "$k"
        done
    done
done
python3 "$(dirname "$0")/certified.py" "$out"
exit $missing
