#!/usr/bin/env bash
# All tests, in two processes: those of whole daemons wait for most of their time, and the others compute. The first half is
# shown as it goes; what the other one said follows when it is over.
#
#   scripts/test.sh PYTHON
set -uo pipefail
python=$1
daemons=(tests/integration tests/chaos tests/dashboards/test_{alerts,calm_hour,metrics_page,panels}.py)

log=$(mktemp)
"$python" -m pytest -p no:cacheprovider "${daemons[@]}" >"$log" 2>&1 &
other=$!
trap 'kill -INT "$other" 2>/dev/null; wait "$other"; rm -f "$log"' EXIT

status=0
"$python" -m pytest "${daemons[@]/#/--ignore=}" || status=1
wait "$other" || status=1
trap 'rm -f "$log"' EXIT
cat "$log"
exit "$status"
