#!/usr/bin/env bash
# Lints, builds and runs every test, C++ and Python. What takes longer: soak.sh, sanitize.sh, fuzz.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
# For the client in tests/clients/node, buf in tests/wire and kubectl in tests/kubernetes. Debian's npm is 336
# packages: not where there is another.
command -v npm >/dev/null || EPIKV_PACKAGES+=(nodejs npm)
# The linters ask git for what is tracked. Tests of experiments start PostgreSQL servers and a balancer of their
# own, let clocks jump, and open pages in a browser.
EPIKV_PACKAGES+=(git postgresql haproxy faketime)
command -v chromium >/dev/null || EPIKV_PACKAGES+=(chromium)
# Python compiles what is imported, once: pip need not compile the rest (0 switches that off, as pip has it), and
# none of hundreds of processes has to compile what it imports of ours.
export PIP_NO_COMPILE=0
unset PYTHONDONTWRITEBYTECODE
prepare
# For tests/e2e/metrics/prometheus_test.py. Unpacked, not installed: the package would start its service.
unpack_prometheus() {
  cd "$prometheus"
  apt-get download prometheus || { apt-get update && apt-get download prometheus; }
  dpkg-deb -x prometheus_*.deb .
}
prometheus=$EPIKV_ROOT/build/prometheus
export PATH=$PATH:$prometheus/usr/bin
fetch_rest() {  # what tests need beside the daemon
  install_tools
  stage "format and lint" bash "$EPIKV_ROOT/tests/lint.sh"
  for folder in "$EPIKV_ROOT/tests/clients/node" "$EPIKV_ROOT/tests/wire"; do
    [ "$folder/node_modules" -nt "$folder/package-lock.json" ] ||
      stage "Node packages ($(basename "$folder"))" npm --prefix "$folder" ci --ignore-scripts --no-audit --no-fund
  done
  stage "Python clients" bash "$EPIKV_ROOT/tests/clients/python/install.sh"
  stage "Kubernetes" bash "$EPIKV_ROOT/tests/kubernetes/install.sh"
  command -v prometheus >/dev/null ||
    { mkdir -p "$prometheus" && stage "Prometheus" unpack_prometheus; }
}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
# It waits for the network and for one core, and so beside the daemon's build, which needs none of it.
fetch_rest &
rest=$!
build epikvd
wait "$rest"
build
# Takes what processor time the tests leave, which wait for their daemons and clocks a third of theirs.
nice -n 19 "$EPIKV_PYTHON" "$EPIKV_ROOT/tests/tidy.py" --jobs "$EPIKV_JOBS" >"$EPIKV_LOGS/clang-tidy.log" 2>&1 &
tidy=$!
export OMP_WAIT_POLICY=PASSIVE
ctest --test-dir build/dev -LE 'nightly|gpu' --output-on-failure -j "$EPIKV_JOBS" --timeout 600
# A file is one process's: its tests share daemons, for which it waits more than it computes.
# In the order of their folders: the long ones, in e2e, come first.
"$EPIKV_PYTHON" -m pytest -q -n $((EPIKV_JOBS + 1)) --dist loadfile --no-loadscope-reorder --durations 15 tests
wait "$tidy" || { cat "$EPIKV_LOGS/clang-tidy.log" >&2; fail "clang-tidy has findings" "they stand above"; }
tail -n 1 "$EPIKV_LOGS/clang-tidy.log"
