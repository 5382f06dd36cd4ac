#!/usr/bin/env bash
# Random requests against the daemon, every answer checked: bash tests/soak.sh [MINUTES] [--seed N].
# 30 minutes unless told otherwise, which is why it is no part of run.sh. tests/soak/soak.py says more.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
setup
build epikvd
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
"$EPIKV_PYTHON" "$EPIKV_ROOT/tests/soak/soak.py" "$@"
