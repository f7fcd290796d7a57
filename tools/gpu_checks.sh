#!/usr/bin/env bash
# gpu_checks.sh COMMAND: `clowder check --engine sm90` over shapes and routings, the smallest first, each with a limit of
# its own so that a hang costs seconds; then runs that must give equal bits. Prints a line for each failure and stops at
# the third.
set -uo pipefail
command=${1:-build/release/clowder}
checks=0
failures=0

fail() {
  echo "FAIL: $1"
  echo "$2" | tail -4
  failures=$((failures + 1))
  if ((failures == 3)); then exit 1; fi
}

clowder_check() { timeout 60 "$command" check --engine sm90 --forward-only --timeout 5 "$@" 2>&1; }

run() {
  local output
  checks=$((checks + 1))
  if ! output=$(clowder_check "$@"); then fail "$*" "$output"; fi
}

# same_bits OPTIONS -- VARIANT -- VARIANT...: the digest of out is that of the options alone, whatever the variant.
same_bits() {
  local options=() first digest
  while [[ $1 != -- ]]; do options+=("$1"); shift; done
  first=$(clowder_check "${options[@]}" --json | grep -oE '"digest":"[0-9a-f]+"' | head -1)
  while (($#)); do
    shift
    local variant=()
    while (($#)) && [[ $1 != -- ]]; do variant+=("$1"); shift; done
    checks=$((checks + 1))
    digest=$(clowder_check "${options[@]}" "${variant[@]}" --json | grep -oE '"digest":"[0-9a-f]+"' | head -1)
    if [[ -z $first || $digest != "$first" ]]; then fail "other bits: ${options[*]} | ${variant[*]}" "$first $digest"; fi
  done
}

# Shapes.
run --tokens 128 --experts 1 --topk 1
run
run --hidden 1024 --intermediate 1024
run --hidden 1024 --intermediate 1024 --shared-intermediate 1024
run --hidden 96 --intermediate 32 --tokens 100
run --hidden 2880 --intermediate 1440 --tokens 300
run --hidden 512 --intermediate 384 --shared-intermediate 640                                  # case 13
run --hidden 2880 --intermediate 2880 --tokens 500 --topk 4 --experts 32                       # case 26
run --hidden 2048 --intermediate 1408 --tokens 500
run --hidden 2048 --intermediate 1536 --tokens 500
for tokens in 0 1 2 63 64 65 127 129 4095 4097; do run --tokens "$tokens" --poison; done       # case 18
for rows in 1023 1024 1025; do                                                                 # case 19
  run --tokens "$rows" --routing one:3 --topk 1 --hidden 1024 --intermediate 896
done
for experts in 1 2 5 512; do run --tokens 700 --experts "$experts" --topk 1 --poison; done     # cases 15, 28
for topk in 1 2 3 6 10 16; do run --tokens 300 --experts 512 --topk "$topk"; done              # case 28
run --tokens 64 --experts 256 --poison                                                         # case 2

# Routes, weights and numbers.
run --tokens 1000 --drop 0.5 --poison --repeat 5                                               # case 3
run --tokens 1000 --drop 1.0 --poison                                                          # case 2
run --tokens 1000 --bad-ids 17 --poison                                                        # case 9
run --tokens 1000 --routing zipf:1.2 --hidden 1024 --intermediate 1024
run --tokens 2000 --ring-rows 1/8 --routing hot:0.9 --hidden 1024 --intermediate 1024 --poison # case 31
run --topk-weights signed --tokens 500                                                         # case 30
run --topk-weights zeros --tokens 500                                                          # case 30
run --topk-weights unnormalised --tokens 500
run --scale 100 --tokens 500
for activation in swiglu-clamp:0.5 swiglu-clamp:7 geglu reglu gpt-oss; do
  run --activation "$activation" --tokens 500 --hidden 1024 --intermediate 1024 --shared-intermediate 256
done

# Run to run, and whatever the tuning (D1, D2).
run --tokens 4097 --experts 16 --topk 4 --hidden 1024 --intermediate 512 --repeat 20
same_bits --tokens 3000 --experts 16 --topk 4 --hidden 1024 --intermediate 1024 --shared-intermediate 512 \
  -- --blocks 2 -- --blocks 78 -- --blocks 100 -- --blocks 132 -- --ring-rows min --chunk-rows 128 \
  -- --ring-rows 1/8 -- --ring-rows full -- --chunk-rows 256 -- --chunk-rows 100000 -- --poison     # cases 4, 14

echo "$checks checks, $failures failed"
exit $((failures > 0))
