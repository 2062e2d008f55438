#!/bin/sh
# all.sh [NAME...]: runs these findings, or all; a line for each: name, ok, changed or not tried, seconds.
# Exit status 1 if one changed, 2 if one could not be tried.
cd "$(dirname "$0")" || exit 2
[ $# -gt 0 ] || set -- *.sh
worst=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for finding in "$@"; do
    name=$(basename "$finding" .sh)
    case $name in all | lib) continue ;; esac
    start=$(date +%s)
    sh "$name.sh" >"$log" 2>&1
    status=$?
    case $status in
        0) outcome=ok ;;
        1) outcome=changed ;;
        *) outcome="not tried" ;;
    esac
    printf '%-36s %-10s %4d s\n' "$name" "$outcome" $(($(date +%s) - start))
    if [ "$status" -ne 0 ]; then
        tail -n 3 "$log" | sed 's/^/    /'
        [ "$worst" -eq 1 ] || worst=$((status == 1 ? 1 : 2))
    fi
done
exit "$worst"
