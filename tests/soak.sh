#!/usr/bin/env bash
# What takes too long for run.sh; each mode starts daemons of its own and exits 1 if something does
# not hold. Their files in tests/soak/ say more.
#
#   soak.sh [MINUTES] [--seed N]    random requests, every answer checked; 30 minutes
#   soak.sh requests [SECONDS]      random requests on random engines, each against itself alone and a sample
#                                   against transformers; 1800 seconds (tests/laws/differential)
#   soak.sh faults [--ends N]       100,000 requests ended by cancels, kills and deadlines, in every state
#   soak.sh bodies [--seconds N]    bodies that are nearly right, to a gateway; half an hour
#   soak.sh readers [--pairs N]     what 50 readers that stall cost others
#   soak.sh outage [--seconds N]    the experiment store is away for a minute, under traffic
#   soak.sh crashes [--kills N]     1000 kills -9 of a daemon that records outcomes, for each kind of store;
#                                   nothing acknowledged may be lost or counted twice. Interrupted, it goes on
#   soak.sh kills [N]               the same of its recorder alone, which records as fast as stores write
#   soak.sh tokenizers [--strings N]  ids and text of 100,000 random strings for each algorithm, as the
#                                   tokenizers library gives them
#   soak.sh families [--configurations N] [--dtype fp32|bf16|fp16]
#                                   random models of every family, served, against transformers
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
setup
if [ "${1:-}" = kills ]; then
  build stores_test
  EPIKV_KILLS=${2:-1000} exec "$EPIKV_ROOT/build/dev/tests/stores_test" --gtest_filter='*KillTest*'
fi
if [ "${1:-}" = tokenizers ]; then
  shift
  build tokenizer_lines
  exec "$EPIKV_PYTHON" "$EPIKV_ROOT/tests/tokenizers/parity.py" "$EPIKV_ROOT/build/dev/tests/tokenizer_lines" "$@"
fi
if [ "${1:-}" = requests ]; then
  build differential
  export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
  answers=$EPIKV_ROOT/build/run/answers.jsonl
  mkdir -p "$(dirname "$answers")"
  rm -f "$answers"
  # Seeds that no run before had. What is found is printed as small as it gets: play it by
  # build/dev/tests/differential FILE, and put it into tests/laws/differential/corpus with its mend.
  "$EPIKV_ROOT/build/dev/tests/differential" --seconds "${2:-1800}" --seed "$(date +%s)000" --answers "$answers"
  exec "$EPIKV_PYTHON" "$EPIKV_ROOT/tests/laws/differential/against_transformers.py" "$answers"
fi
build epikvd
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
if [ "${1:-}" = families ]; then
  exec "$EPIKV_PYTHON" -m epikv_lab.export.sweep "${@:2}"
fi
case ${1:-} in
faults) script=ends.py && shift ;;
bodies) script=bodies.py && shift ;;
readers) script=readers.py && shift ;;
outage) script=outage.py && shift ;;
crashes) script=crashes.py && shift ;;
*) script=soak.py ;;
esac
"$EPIKV_PYTHON" "$EPIKV_ROOT/tests/soak/$script" "$@"
