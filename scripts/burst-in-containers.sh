#!/bin/sh
# burst-in-containers.sh PROFILE...: each engine of docker-compose.yml in turn: start, load, report in ./runs, stop.
# One engine at a time, so that none disturbs another. With several, it ends with one page that compares them,
# ./runs/comparison.html. The exit code is that of the run, or the last that was not 0.
#
#   sh scripts/burst-in-containers.sh vllm tgi lightllm
set -u
cd "$(dirname "$0")/.."

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
if docker compose version >/dev/null 2>&1; then compose="docker compose"; else compose=docker-compose; fi
command -v docker >/dev/null && command -v "${compose%% *}" >/dev/null || fail "docker and its compose plugin are needed"
known=$(sed -n 's/^  burstline-\([a-z-]*\):$/\1/p' docker-compose.yml | tr '\n' ' ')
for profile in "$@"; do
    case " $known" in *" $profile "*) ;; *) fail "no profile '$profile'; expected of: $known" ;; esac
done
why=$(docker version --format '{{.Server.Version}}' 2>&1) ||
    fail "no container daemon answers ($(printf '%s' "$why" | tail -n 1)); start it, or set DOCKER_HOST"
# Made by a daemon it would be root's.
mkdir -p runs && [ -w runs ] || fail "./runs cannot be written; expected a folder of yours"

BURSTLINE_USER=${BURSTLINE_USER:-$(id -u):$(id -g)}
REVISION=${REVISION:-$(git describe --always --dirty=+ --abbrev=12 --exclude='*' 2>/dev/null)}
export BURSTLINE_USER REVISION
profile=$1
# Ctrl-C goes to the run, which still writes its report; then the server is stopped.
trap : INT
trap '$compose --profile "$profile" down --timeout 60' EXIT

# image_of SERVICE: as the file has it, its variables replaced.
image_of() { $compose --profile "$1" config | sed -n "/^  $1:\$/,/^  [^ ]/s/^    image: //p"; }

before=$(ls -d runs/*/ 2>/dev/null)
worst=0
for profile in "$@"; do
    image=$(image_of "$profile")
    if [ "$image" != burstline:local ] && ! docker image inspect "$image" >/dev/null 2>&1; then
        docker pull "$image" || fail "$image cannot be pulled: log in to its registry, make room, or load it (docker load)"
    fi
    $compose --profile "$profile" build "burstline-$profile" || fail "the image was not built: see above"
    SERVER_DIGEST=$(docker image inspect --format '{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}' "$image")
    export SERVER_DIGEST
    had=$(ls -d runs/*/ 2>/dev/null)
    # `run` waits until the server answers and gives back Burstline's own exit code.
    $compose --profile "$profile" run --rm "burstline-$profile"
    code=$?
    made=$(ls -d runs/*/ 2>/dev/null | grep -vxF "${had:-none}" | head -n 1)
    $compose --profile "$profile" logs --no-color "$profile" >"${made:-runs/}server.log" 2>/dev/null
    [ "$code" -eq 0 ] || { worst=$code; tail -n 40 "${made:-runs/}server.log" >&2; }
    $compose --profile "$profile" down --timeout 60
done

new=$(ls -d runs/*/ 2>/dev/null | grep -vxF "${before:-none}")
if [ $# -ge 2 ] && [ "$(printf '%s\n' "$new" | grep -c .)" -ge 2 ]; then
    # shellcheck disable=SC2086
    $compose --profile "$profile" run --rm --no-deps --entrypoint burstline "burstline-$profile" \
        compare --format html --out /runs/comparison.html $(printf '%s\n' "$new" | sed 's|^|/|')
    code=$?
    [ "$worst" -ne 0 ] || worst=$code
    [ ! -e runs/comparison.html ] || echo "Comparison: runs/comparison.html"
fi
exit "$worst"
