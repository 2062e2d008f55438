#!/bin/sh
# check-wheel.sh [PYTHON]: builds the sdist and the wheel, installs the wheel alone into an empty environment, and
# runs every verb there: from an empty folder, and from one with packages called like ours, beside PyPI's `reports`.
set -eu
. "$(dirname "$0")/virtualenv.sh"
python=${1:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1
unset PYTHONPATH

# Of a copy without links, as a zip file or Windows may make one.
mkdir "$work/copy"
(cd "$here" && git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$work/copy")
find "$work/copy" -type l -delete
make_venv "$python" "$work/env"
"$uv" build --quiet --python "$python" --out-dir "$work/dist" "$work/copy"
uv_pip "$work"/dist/*.whl
PATH="$work/env/bin:$PATH"

# passes CODES COMMAND...: it ends with one of these codes ("0 4": a run that is not VALID on a busy machine is done, too).
passes() {
    codes=$1 code=0
    shift
    "$@" >"$work/out" 2>&1 || code=$?
    case " $codes " in
    *" $code "*) echo "  ok: $*" ;;
    *)
        cat "$work/out" >&2
        echo "exit code $code: $* (expected: $codes)" >&2
        exit 1
        ;;
    esac
}

# What imports most: every verb's help, a run and its report.
short() {
    for verb in $(burstline --help | sed -n 's/^  \([a-z-]\{1,\}\)  .*/\1/p'); do passes 0 burstline "$verb" --help; done
    # shellcheck disable=SC2086
    passes "0 4" burstline run --engine reference $small --repeats 2 --out runs
    # A set of repeats has a folder of its own.
    set -- $(for run in runs/*/manifest.json; do dirname "$run"; done)
    passes 0 burstline report "$1" --format text
    passes "0 4" burstline compare "$1" "$2" --anyway
    passes 0 burstline bound --model llama-3.1-8b --device h100-sxm5-80g --batch 32
    passes 0 python -P -c "import burstline; print(burstline.load('$1').numbers, burstline.bound('llama-3.1-8b', 'h100-sxm5-80g'))"
}

small="--requests 24 --prompt-tokens 16 --output-tokens 4"
echo "From an empty folder"
mkdir "$work/empty" && cd "$work/empty" && short
run=$(dirname "$(echo runs/*/manifest.json | cut -d' ' -f1)")
passes 0 burstline make-model tiny --like tiny
passes 0 burstline report "$run" --to exported --format csv
passes 0 burstline verify "$run"
passes 0 burstline report "$run" --to exported
passes 0 burstline run laptop --dry-run
passes 0 python -P -c "import importlib.resources as r; r.files('burstline.measure.record').joinpath('summary.schema.json').read_text()"
passes 0 burstline engines
passes 130 timeout --signal INT --preserve-status 8 burstline serve reference
passes "0 4" burstline certify --requests 24 --prompt-tokens 16 --output-tokens 4
passes 0 burstline study training --out study
# A machine whose speed wanders, or that others use, is not measured, and one line says so.
passes "0 2" burstline calibrate --device cpu --quick --out cpu.toml
[ -e cpu.toml ] || grep -E 'burstline: .*(on a steady machine by at most|too much to measure)' "$work/out"
echo "From a folder with packages called like ours"
mkdir "$work/hostile" && cd "$work/hostile"
for name in loadgen measure servers workloads reports roofline research; do
    mkdir "$name" && echo 'raise SystemExit("a module of the working folder was imported")' >"$name/__init__.py"
done
uv_pip reports
export PYTHONPATH=.
short
