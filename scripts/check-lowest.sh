#!/bin/sh
# check-lowest.sh [PYTHON]: installs each direct dependency at the lowest version that pyproject.toml allows, on Python
# 3.11, and makes a run, its report in every format, a comparison and a bound with them.
set -eu
. "$(dirname "$0")/virtualenv.sh"
python=${1:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1
unset PYTHONPATH
make_venv "$python" "$work/env"
uv_pip --resolution lowest-direct "$here"
PATH="$work/env/bin:$PATH"
cd "$work"
burstline run -q --engine reference --requests 24 --prompt-tokens 16 --output-tokens 4 --repeats 2 >out 2>&1 || [ $? -eq 4 ] || {
    cat out >&2
    exit 1
}
set -- $(for run in runs/*/manifest.json; do dirname "$run"; done)
burstline report "$1" --to exported >out 2>&1 || { cat out >&2; exit 1; }
burstline compare "$1" "$2" --anyway --format html >out 2>&1 || [ $? -eq 4 ] || { cat out >&2; exit 1; }
python -P -c "
import burstline
run = burstline.load('$1')
assert len(run.requests) == 24 and run.numbers.point.notna().any() and run.figure('ttft_cdf').png
assert burstline.bound('llama-3.1-8b', 'h100-sxm5-80g').ops.ideal_us.sum() > 0
"
"$uv" pip list --python "$work/env/bin/python" 2>/dev/null | grep -E '^(numpy|scipy|pandas|pyarrow|matplotlib|huggingface|httpx) '
