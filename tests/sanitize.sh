#!/usr/bin/env bash
# ASan + UBSan on the C++ suite; TSan on everything that threads touch, built without torch.
# Not a part of run.sh: it builds the tree twice more.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
setup
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1

stage "configure asan" cmake --preset asan
stage "build asan" cmake --build build/asan -j "$EPIKV_JOBS"
# LibTorch keeps what it allocated at load for the life of the process; every operator allocates.
ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:malloc_context_size=8:quarantine_size_mb=64 \
  UBSAN_OPTIONS=print_stacktrace=1 \
  ctest --test-dir build/asan -LE gpu --output-on-failure -j "$EPIKV_JOBS" --timeout 5400  # laws_test

stage "configure tsan" cmake --preset tsan
stage "build tsan" cmake --build build/tsan -j "$EPIKV_JOBS"
TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:suppressions=$EPIKV_ROOT/tests/sanitizers/tsan.supp" \
  ctest --test-dir build/tsan --output-on-failure -j "$EPIKV_JOBS" --timeout 1800
