#!/bin/sh
# burst-in-containers.sh PROFILE...: each engine of docker-compose.yml in turn: up, burst, report in ./runs, down.
# One engine at a time, so that none disturbs another. Ends with the command that compares what was measured.
#
#   sh scripts/burst-in-containers.sh vllm tgi lightllm
set -u
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
if docker compose version >/dev/null 2>&1; then compose="docker compose"; else compose=docker-compose; fi

before=$(ls -d runs/*/ 2>/dev/null)
worst=0
for profile in "$@"; do
    # `run` waits until the server is healthy and gives back Burstline's own exit code.
    $compose --profile "$profile" build "burstline-$profile" &&
        $compose --profile "$profile" run --rm "burstline-$profile"
    code=$?
    [ "$code" -eq 0 ] || { $compose --profile "$profile" logs --tail 40 "$profile" >&2; worst=$code; }
    $compose --profile "$profile" down
done

[ $# -lt 2 ] || {
    echo "To compare them (on a machine with Burstline):"
    # shellcheck disable=SC2046
    echo burstline compare $(ls -d runs/*/ | grep -vxF "$before")
}
exit "$worst"
