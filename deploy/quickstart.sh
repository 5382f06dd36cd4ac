#!/usr/bin/env bash
# From a bare Debian 12 to a streamed completion under a KV budget. Run it as root, or install the
# packages it names first. --keep leaves the daemon running and prints its addresses.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

keep=
for argument in "$@"; do
  case $argument in
    --keep) keep=1 ;;
    *) fail "unknown argument '$argument'" "usage: bash deploy/quickstart.sh [--keep]" ;;
  esac
done

# A problem, and a budget at which half of its generated tokens are dropped
# (tools/sample_model/README.md, "Quickstart problem").
PROBLEM_SEED=9
BUDGET=384
POLICY=epikv_flat

prepare
install_tools >"$EPIKV_LOGS/tools.txt" 2>&1 &  # while the daemon is built
tools=$!
build epikvd epikv-probe
wait "$tools" || { cat "$EPIKV_LOGS/tools.txt" >&2; exit 1; }
tail -n 1 "$EPIKV_LOGS/tools.txt"

sample=$EPIKV_ROOT/tools/sample_model/$(cat "$EPIKV_ROOT/tools/sample_model/SHIPPED")
model=$EPIKV_ROOT/build/sample/$(sha256sum "$sample"/*.* "$EPIKV_ROOT"/tools/epikv/export/*.py |
  sha256sum | cut -c1-16).pt
if [ ! -f "$model" ]; then
  mkdir -p "$(dirname "$model")"
  stage "export" "$EPIKV_VENV/bin/epikv" export "$sample" "$model" --name sample --dtype fp32
fi
ln -sf "$(basename "$model")" "$EPIKV_ROOT/build/sample/model.pt"  # the name that the documents use

run=$EPIKV_ROOT/build/run
mkdir -p "$run"
export GOMP_SPINCOUNT=10000  # as in the Dockerfile
"$EPIKV_ROOT/build/dev/server/epikvd" --model="$model" --model_name=sample \
  --artefact_dir="$sample/artefacts" \
  --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 --admin_listen=127.0.0.1:0 \
  >"$run/addresses.json" 2>"$run/epikvd.log" &
daemon=$!
stop_daemon() { kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null || true; }
trap stop_daemon EXIT

for _ in $(seq 600); do
  [ -s "$run/addresses.json" ] && break
  kill -0 "$daemon" 2>/dev/null || { cat "$run/epikvd.log" >&2; fail "epikvd did not start" "its log is above"; }
  sleep 0.1
done
address() { "$EPIKV_PYTHON" -c "import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])" "$run/addresses.json" "$1"; }
server=$(address grpc)
printf '%-24s gRPC %s, metrics http://%s/metrics\n\n' "serving" "$server" "$(address metrics)"

"$EPIKV_VENV/bin/epikv" demo --server "$server" --seed "$PROBLEM_SEED" \
  --policy "$POLICY" --budget "$BUDGET" ||
  fail "the completion is not what the sample model promises" "the daemon's log is $run/epikvd.log"

if [ -n "$keep" ]; then
  trap - EXIT
  disown "$daemon"
  printf '\nstill serving (stop it with: kill %s)\n  gRPC     %s\n  metrics  http://%s/metrics\n' \
    "$daemon" "$server" "$(address metrics)"
  printf '  try      export PATH=%s:$PATH EPIKV_SERVER=%s\n' "$EPIKV_VENV/bin" "$server"
  printf '           epikv generate -n 1024 --policy cur --budget 300 "$(python -m epikv.sample problem | head -n 1)"\n'
fi
