#!/usr/bin/env bash
# Builds the kernel tests twice, as they are and under AddressSanitizer and UBSan, runs both on every instruction set of
# this CPU, and prints a short table last. For machines that a developer does not sit at (AMX, AVX-512).
#   tools/kernel_check.sh BUILD_FOLDER OUTPUT_FOLDER [CMAKE_ARGUMENT...]
# HCP_LIBTORCH names libtorch where there is no .deps folder; -DCMAKE_PREFIX_PATH=... what the system lacks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly kBuild=${1:?a folder to build in}
readonly kOut=${2:?where logs go}
shift 2
readonly kJobs=$(nproc)
mkdir -p "$kOut"
table=()
failed=0

# build NAME CMAKE_ARGUMENT...
build() {
  local name=$1 start=$SECONDS
  shift
  cmake -G Ninja -B "$kBuild/$name" "$@" >"$kOut/configure_$name.txt" 2>&1 || { tail -n 20 "$kOut/configure_$name.txt"; exit 1; }
  ninja -C "$kBuild/$name" -j "$kJobs" tests/kernels/all >"$kOut/build_$name.txt" 2>&1 ||
    { grep -E 'error|undefined' "$kOut/build_$name.txt" | head -n 20; exit 1; }
  table+=("built $name in $((SECONDS - start)) s")
}

# run NAME: every test of tests/kernels, one log each.
run() {
  local name=$1 test pids=() names=()
  local start=$SECONDS
  for test in "$kBuild/$name"/tests/kernels/*_test; do
    names+=("$(basename "$test")")
    OMP_NUM_THREADS=2 timeout 560 "$test" --gtest_brief=1 >"$kOut/${name}_$(basename "$test").txt" 2>&1 &
    pids+=($!)
  done
  for i in "${!pids[@]}"; do
    if wait "${pids[$i]}"; then
      table+=("ok    $name ${names[$i]}: $(grep -E 'PASSED|tests ran' "$kOut/${name}_${names[$i]}.txt" | tail -n 1)")
    else
      failed=$((failed + 1))
      table+=("FAIL  $name ${names[$i]}: $(grep -E 'FAILED|ERROR: |runtime error' "$kOut/${name}_${names[$i]}.txt" | head -n 1)")
    fi
  done
  table+=("ran $name in $((SECONDS - start)) s")
}

build plain "$@"
run plain
# libtorch is not instrumented: no checks across its boundary. The stack frames that return-checking puts on the heap are
# not aligned for 64-byte vectors (GCC bug 110027): without it.
export ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:alloc_dealloc_mismatch=0:detect_stack_use_after_return=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
build sanitized "$@" -DHCP_SANITIZE=address,undefined
run sanitized

grep -m1 'model name' /proc/cpuinfo
grep -m1 -o -E 'avx2|fma' /proc/cpuinfo | tr '\n' ' '
grep -m1 flags /proc/cpuinfo | grep -o -E 'avx512f|avx512_bf16|amx_bf16|amx_tile' | sort -u | tr '\n' ' '
printf '\n'
printf '%s\n' "${table[@]}"
printf '%d failed\n' "$failed"
exit $((failed > 0))
