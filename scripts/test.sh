#!/usr/bin/env bash
# All tests, in parts, three of them at a time: tests of whole daemons wait for most of their time, and the others compute.
# What takes long begins first, and whoever is through takes the next part. A part is shown when it is over.
#
#   scripts/test.sh PYTHON
set -uo pipefail
export python=$1 lock=${BASH_SOURCE[0]}
parts=(
  'tests/chaos'
  'tests/integration/test_[a-h]*.py'
  'tests/integration/test_[!a-h]*.py'
  'tests/adapters/test_[a-k]*.py'
  'tests/adapters/test_[!a-k]*.py'
  'tests/engine'
  'tests/plugin'
  'tests/cli'
  'tests/property'
  'tests/dashboards/test_[amp]*.py'
)

# Whatever is in no part is one of its own, so that nothing is left out that is new.
rest="tests${parts[*]/#/ --ignore-glob=}"

part() {
  local status=0
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  # shellcheck disable=SC2086 - patterns and options in it are meant to be taken apart
  case $1 in
    *--ignore-glob=*) set -f ;;  # those patterns are pytest's
  esac
  "$python" -m pytest -p no:cacheprovider $1 >"$log" 2>&1 || status=1
  flock "$lock" cat "$log"
  return "$status"
}
export -f part

printf '%s\0' "${parts[@]}" "$rest" | xargs --null --max-procs=3 --replace bash -c 'part "$1"' part {}
