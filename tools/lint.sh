#!/usr/bin/env bash
# lint.sh [--fix]: checks C++ and Python, or formats them.
set -euo pipefail
cd "$(dirname "$0")/.."

python_folders=(python tests/python examples)
mapfile -t cpp < <(find src include tests python/bindings -name '*.h' -o -name '*.cpp' | sort)

if [[ ${1:-} == --fix ]]; then
  clang-format -i "${cpp[@]}"
  "$PY" -m ruff check -q --select I --fix "${python_folders[@]}"
  "$PY" -m ruff format -q "${python_folders[@]}"
  exit
fi

clang-format --dry-run -Werror "${cpp[@]}"
"$PY" -m ruff check "${python_folders[@]}"
"$PY" -m ruff format --check "${python_folders[@]}"

# A preset of its own, because it holds the bindings beside the library and the tests.
tools/build.sh lint --configure-only
"$PY" - <<'PYTHON' | xargs -0 -P "$JOBS" -n 1 clang-tidy --quiet -p build/lint
import json

for entry in json.load(open("build/lint/compile_commands.json")):
    print(entry["file"], end="\0")
PYTHON
