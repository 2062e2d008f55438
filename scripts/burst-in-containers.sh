#!/bin/sh
# burst-in-containers.sh PROFILE...: each engine of docker-compose.yml in turn: up, burst, report in ./runs, down.
# One engine at a time, so that none disturbs another. With several, it ends with one page that compares them,
# ./runs/comparison.html.
#
#   sh scripts/burst-in-containers.sh vllm tgi lightllm
set -u
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
if docker compose version >/dev/null 2>&1; then compose="docker compose"; else compose=docker-compose; fi

before=$(ls -d runs/*/ 2>/dev/null)
worst=0
last=
for profile in "$@"; do
    # `run` waits until the server is healthy and gives back Burstline's own exit code.
    $compose --profile "$profile" build "burstline-$profile" &&
        $compose --profile "$profile" run --rm "burstline-$profile"
    code=$?
    [ "$code" -eq 0 ] || { $compose --profile "$profile" logs --tail 40 "$profile" >&2; worst=$code; }
    $compose --profile "$profile" down
    last=$profile
done

new=$(ls -d runs/*/ 2>/dev/null | grep -vxF "${before:-none}")
if [ "$(printf '%s\n' "$new" | grep -c .)" -ge 2 ]; then
    # shellcheck disable=SC2086
    $compose --profile "$last" run --rm --no-deps "burstline-$last" \
        compare --format html --out /runs/comparison.html $(printf '%s\n' "$new" | sed 's|^|/|')
    code=$?
    [ "$worst" -ne 0 ] || worst=$code
    [ ! -e runs/comparison.html ] || echo "Comparison: runs/comparison.html"
    $compose --profile "$last" down
fi
exit "$worst"
