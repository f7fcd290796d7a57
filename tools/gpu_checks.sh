#!/usr/bin/env bash
# gpu_checks.sh COMMAND: `clowder check --engine sm90` over shapes and routings, the smallest first, each with a limit of
# its own so that a hang costs seconds. Prints one line a check and stops at the third failure.
set -uo pipefail
command=${1:-build/release/clowder}
failures=0
run() {
  local output rc
  output=$(timeout 40 "$command" check --engine sm90 --forward-only --timeout 5 "$@" 2>&1)
  rc=$?
  if [[ $rc == 0 ]]; then
    echo "ok    $* | $(grep -E '^out' <<<"$output")"
  else
    echo "FAIL  rc $rc: $*"
    tail -4 <<<"$output"
    failures=$((failures + 1))
    if ((failures == 3)); then exit 1; fi
  fi
}
run --tokens 128 --experts 1 --topk 1
run
run --hidden 1024 --intermediate 1024
run --hidden 1024 --intermediate 1024 --shared-intermediate 1024
run --hidden 96 --intermediate 32 --tokens 100
run --hidden 2880 --intermediate 1440 --tokens 300
run --hidden 512 --intermediate 384 --shared-intermediate 640
run --tokens 0
run --tokens 1
run --tokens 1025 --routing one:3 --topk 1 --hidden 1024 --intermediate 896
run --tokens 4097 --experts 16 --topk 4 --hidden 1024 --intermediate 512 --repeat 3
run --tokens 1000 --drop 0.5 --poison --repeat 3
run --tokens 1000 --drop 1.0 --poison
run --tokens 1000 --bad-ids 17 --poison
run --tokens 2000 --ring-rows min --chunk-rows 128 --hidden 1024 --intermediate 1024 --poison --repeat 3
run --tokens 2000 --ring-rows 1/8 --routing hot:0.9 --hidden 1024 --intermediate 1024 --poison
run --tokens 300 --experts 512 --topk 16
run --tokens 1000 --blocks 2 --hidden 512
run --tokens 1000 --blocks 78 --hidden 1024 --intermediate 1024
run --activation swiglu-clamp:0.5 --tokens 500 --hidden 1024 --intermediate 1024
run --topk-weights signed --tokens 500
run --topk-weights zeros --tokens 500
run --scale 100 --tokens 500
echo "checks done, $failures failed"
exit $((failures > 0))
