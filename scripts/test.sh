#!/usr/bin/env bash
# All tests, in parts, four of them at a time: tests of whole daemons wait for most of their time, and the others compute.
# What takes long begins first, and whoever is through takes the next part. A part is shown when it is over.
#
# Each part has a PID namespace of its own where the kernel and the user allow it: a walk over /proc then meets no process
# of another part. PID 1 is a shell, which reaps orphans.
#
#   scripts/test.sh PYTHON [fast]
set -uo pipefail
export python=$1 lock=${BASH_SOURCE[0]}
if [[ ${2:-all} == fast ]]; then
  parts=(
    'tests/engine tests/domain tests/config tests/doctor'
    'tests/plugin tests/cluster tests/daemon'
    'tests/api tests/emulator tests/observability tests/project tests/world'
  )
else
  parts=(
    'tests/integration/test_[n-r]*.py'
    'tests/property/test_[a-o]*.py'
    'tests/property/test_[!a-o]*.py'
    'tests/dashboards/test_[!amp]*.py'
    'tests/integration/test_[!a-r]*.py'
    'tests/adapters/test_[!a-k]*.py'
    'tests/dashboards/test_[amp]*.py'
    'tests/chaos/test_k*.py'
    'tests/chaos/test_[!k]*.py'
    'tests/integration/test_[a-g]*.py'
    'tests/integration/test_[h-m]*.py'
    'tests/cli'
    'tests/engine'
    'tests/adapters/test_[a-k]*.py'
    'tests/plugin'
  )
  # Whatever is in no part is one of its own, so that nothing is left out that is new.
  parts+=("tests${parts[*]/#/ --ignore-glob=}")
fi

isolated() { unshare --pid --fork --mount-proc --kill-child bash -c '"$@"; exit' isolated "$@"; }
isolated true 2>/dev/null || isolated() { "$@"; }
export -f isolated

part() {
  local status=0
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  # shellcheck disable=SC2086 - patterns and options in it are meant to be taken apart
  case $1 in
    *--ignore-glob=*) set -f ;;  # those patterns are pytest's
  esac
  isolated "$python" -m pytest -p no:cacheprovider $1 >"$log" 2>&1 || status=1
  flock "$lock" cat "$log"
  return "$status"
}
export -f part

printf '%s\0' "${parts[@]}" | xargs --null --max-procs=4 --replace bash -c 'part "$1"' part {}
