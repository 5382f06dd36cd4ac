#!/usr/bin/env bash
# What is slow and rarely breaks, which run.sh leaves out: C++ tests with Nightly in their names, Python tests marked
# nightly, and clang-tidy over every file. Two hours on two cores. Every assertion is either here or in run.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
setup
build
export OMP_WAIT_POLICY=PASSIVE
bash "$EPIKV_ROOT/tests/tidy.sh" --all
ctest --test-dir build/dev --build-config Nightly -L nightly --output-on-failure -j "$EPIKV_JOBS" --timeout 5400
"$EPIKV_PYTHON" -m pytest -q -m nightly tests
