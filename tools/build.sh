#!/usr/bin/env bash
# build.sh PRESET [--configure-only]: configures a preset anew when the compiler, the Python or the presets changed, and
# builds it. The Makefile sets PY, CXX and JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
folder=build/$preset
stamp=$folder/.configured
python=$("$PY" -c "import sys; print(sys.executable)")
for program in cmake ninja; do
  command -v "$program" >/dev/null || { echo "$program is missing: pip install -r requirements/build.txt" >&2; exit 1; }
done

key="$CXX $python"
# ninja sees to later changes of CMakeLists.txt; without a build, only configuring again does.
if [[ ${2:-} == --configure-only || ! -f $folder/build.ninja || CMakePresets.json -nt $stamp || $(cat "$stamp" 2>/dev/null) != "$key" ]]; then
  mkdir -p "$folder"
  if ! cmake --fresh --preset "$preset" -DPython_EXECUTABLE="$python" >"$folder/configure.log" 2>&1; then
    # CMake wraps its messages.
    tr -s ' \n' ' ' <"$folder/configure.log" | grep -oE "[A-Za-z0-9_.]+ is missing: .*apt-get install [a-z0-9-]+" >&2 ||
      cat "$folder/configure.log" >&2
    exit 1
  fi
  echo "$key" >"$stamp"
fi
if [[ ${2:-} != --configure-only ]]; then cmake --build "$folder" --parallel "$JOBS"; fi
