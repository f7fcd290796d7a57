#!/usr/bin/env bash
# lint.sh [--fix]: checks C++ and Python, or formats them. The Makefile sets PY, CXX and JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."

python_folders=(python tests/python tests/tools tools examples benchmarks docs)
mapfile -t cpp < <(find src include tests python/bindings examples/cpp benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort)

if [[ ${1:-} == --fix ]]; then
  clang-format -i "${cpp[@]}"
  "$PY" -m ruff check -q --select I --fix "${python_folders[@]}"
  "$PY" -m ruff format -q "${python_folders[@]}"
  exit
fi

# Every check runs, so that one run shows all there is to mend.
failed=()
check() {
  local name=$1
  shift
  "$@" || failed+=("$name")
}

# A preset of its own, which holds the bindings beside the library and the tests; nothing is compiled.
tidy() {
  tools/build.sh lint --configure-only || return
  "$PY" - <<'PYTHON' | xargs -0 -P "$JOBS" -n 1 clang-tidy --quiet -p build/lint 2> >(grep -v 'warnings\? generated\|^Suppressed\|^Use -header-filter' >&2)
import json

for entry in json.load(open("build/lint/compile_commands.json")):
    print(entry["file"], end="\0")
PYTHON
}

check clang-format clang-format --dry-run -Werror "${cpp[@]}"
check ruff "$PY" -m ruff check "${python_folders[@]}"
check "ruff format" "$PY" -m ruff format --check "${python_folders[@]}"
check clang-tidy tidy
if ((${#failed[@]})); then
  (IFS=, && echo "lint: failed: ${failed[*]}" >&2)
  exit 1
fi
