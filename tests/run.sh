#!/usr/bin/env bash
# Builds and runs every test, C++ and Python. What takes longer: soak.sh, sanitize.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
setup
build
export OMP_WAIT_POLICY=PASSIVE
ctest --test-dir build/dev --output-on-failure -j "$EPIKV_JOBS" --timeout 600
"$EPIKV_PYTHON" -m pytest -q tests
