#!/usr/bin/env bash
# Runs all tests in parts, five at a time: tests of whole daemons wait for most of their time, and the others compute.
# Long parts start first, and a free worker takes the next part. The output of a part is shown when it has ended.
#
# Each part has a separate PID namespace where the kernel and the user's permissions allow it: a scan of /proc then finds
# no process of another part. PID 1 is a shell, which reaps orphans.
#
# The end of the output has the time of each part, in seconds: elapsed, of the processor in user mode, and in the kernel.
#
#   scripts/test.sh PYTHON [fast | property]
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE  # otherwise each part compiles the plugins of pytest anew
export python=$1 lock=${BASH_SOURCE[0]} options=
if [[ ${2:-all} == property ]]; then
  # The searching tests, as deep as tests/depth.py says: each file is a part, and none has a deadline.
  options='--hypothesis-profile=deep --timeout=0'
  parts=(tests/property/test_*.py tests/dashboards/test_hostile_hour.py)
elif [[ ${2:-all} == fast ]]; then
  parts=(
    'tests/engine tests/domain tests/config tests/doctor'
    # Without tests that start daemons, tenants, other test runs, linters and services.
    'tests/project tests/cluster --ignore=tests/project/test_recipes.py --ignore=tests/cluster/test_cluster_check_gpu.py'
    'tests/api tests/emulator tests/observability tests/simulation --deselect=tests/observability/test_metrics_tls.py::TestBothDaemons'
    'tests/plugin/test_[!a-h]*.py tests/daemon'
    'tests/plugin/dra'
    'tests/plugin/test_[a-h]*.py'
  )
else
  parts=(
    'tests/dashboards/test_[amp]*.py'
    'tests/project'
    'tests/power'
    'tests/integration/test_d*.py'
    'tests/integration/test_[n-r]*.py'
    'tests/integration/test_[!a-gn-r]*.py'
    'tests/integration/test_gpu_r*.py'
    'tests/attacks'
    'tests/adapters/test_[a-n]*.py'
    'tests/integration/test_a*.py'
    'tests/cli'
    'tests/dashboards/test_[!amp]*.py'
    'tests/integration/test_gpu_[!r]*.py'
    'tests/adapters/test_[!a-n]*.py'
    'tests/property'
    'tests/chaos/test_[!k]*.py'
    'tests/integration/test_[bcef]*.py'
    'tests/plugin tests/daemon'
    'tests/engine'
    'tests/chaos/test_k*.py'
  )
  # All remaining tests are one more part, so that new tests are not left out; it computes for long.
  parts=("tests${parts[*]/#/ --ignore-glob=}" "${parts[@]}")
fi

isolated() { unshare --pid --fork --mount-proc --kill-child bash -c '"$@"; exit' isolated "$@"; }
isolated true 2>/dev/null || isolated() { "$@"; }
export -f isolated

part() {
  local status=0 TIMEFORMAT='%0R %0U %0S'
  log=$(mktemp)
  trap 'rm -f "$log" "$log.time"' EXIT
  # shellcheck disable=SC2086 - patterns and options must be split
  case $1 in
    *--ignore-glob=*) set -f ;;  # those patterns are pytest's
  esac
  { time isolated "$python" -m pytest -p no:cacheprovider $options $1 >"$log" 2>&1 || status=1; } 2>"$log.time"
  # shellcheck disable=SC2046 - three numbers
  printf '%7d %6d %6d  %.70s\n' $(<"$log.time") "$1" >>"$times"
  flock "$lock" cat "$log"
  return "$status"
}
export -f part

times=$(mktemp)
export times
trap 'rm -f "$times"' EXIT
status=0
printf '%s\0' "${parts[@]}" | xargs --null --max-procs=5 --replace bash -c 'part "$1"' part {} || status=$?
echo 'elapsed   user kernel  part'
sort -rn "$times"
exit "$status"
