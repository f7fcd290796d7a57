#!/usr/bin/env bash
# test_package.sh: the C++ library as users get it, static and shared: installs it, builds examples/cpp against the
# package, runs it, and looks at what headers need and what a shared library exports. After tools/build.sh release; the
# Makefile sets CXX and JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/build/package
mkdir -p "$folder"
quietly() { "$@" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }; }
fail() { echo "test_package: $*" >&2; exit 1; }

for header in include/clowder/*.h; do
  echo "#include \"${header#include/}\"" |
    "$CXX" -std=c++20 -Wall -Wextra -Wconversion -Wno-sign-conversion -Werror -fsyntax-only -Iinclude -x c++ - ||
    fail "$header does not compile by itself"
done

# The release build has the static library, with every engine; the shared one is built by itself, without kernels for
# GPUs, which take long.
rm -rf "$folder/static" "$folder/shared"
quietly cmake --install build/release --prefix "$folder/static"
quietly cmake -S . -B "$folder/shared-build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  -DCLOWDER_BUILD_CLI=OFF -DCLOWDER_BUILD_TESTS=OFF -DCLOWDER_CUDA=OFF
quietly cmake --build "$folder/shared-build" --parallel "$JOBS"
quietly cmake --install "$folder/shared-build" --prefix "$folder/shared"

# use SOURCE NAME PREFIX: builds a user's project against an installed package and runs its program.
use() {
  local source=$1 program=$2 kind=$3
  local build=$folder/$program-$kind
  quietly cmake --fresh -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$folder/$kind"
  grep -q "clowder_DIR:PATH=$folder/$kind/" "$build/CMakeCache.txt" || fail "$build found another clowder"
  quietly cmake --build "$build"
  "$build/$program" || fail "$program failed with the $kind library"
}
for kind in static shared; do
  use examples/cpp train_layer $kind
  use tests/package consumer $kind
done

# As a part of another project, targets and defaults are there; what it compiles is the same.
quietly cmake --fresh -S tests/package -B "$folder/subdirectory" -G Ninja -DCLOWDER_SOURCE="$PWD"
[[ ! -e $folder/subdirectory/clowder/tests/CTestTestfile.cmake ]] || fail "a subproject builds Clowder's tests"

# Exactly the interface: each name, and no instance of a template of the standard library.
library=$(echo "$folder"/shared/lib*/libclowder.so)
exported=$(nm -D --defined-only -C "$library" | cut -d' ' -f3- |
  sed -E 's/^(vtable|typeinfo|typeinfo name) for //; s/^(clowder::[A-Za-z_]+).*/\1/' | sort -u | tr '\n' ' ')
interface="clowder::Error clowder::Group clowder::SymmetricMemory clowder::Workspace clowder::make_caller_owned_group \
clowder::make_threaded_groups clowder::make_virtual_group clowder::summarise clowder::to_string "
[[ $exported == "$interface" ]] || fail "the shared library exports $exported, must export $interface"
echo "package: static and shared libraries installed, found, linked and run"
