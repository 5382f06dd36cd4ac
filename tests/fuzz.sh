#!/usr/bin/env bash
# Fuzzes what reads bytes from outside: bash tests/fuzz.sh [MINUTES] [TARGET...], 30 minutes for each
# of all targets (tests/fuzz/*_fuzz.cc) unless told otherwise. An input that breaks something is kept
# in build/fuzz/crashes and fails the script; `build/fuzz/tests/fuzz/TARGET FILE` shows what it does
# (build/fuzz-torch/... of model_fuzz, the one that needs LibTorch).
# Inputs that reach code which those in tests/fuzz/corpus do not are added there, to be committed:
# fuzz_corpus_test runs them in every build.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
EPIKV_PACKAGES+=(clang libclang-rt-14-dev strace)
minutes=${1:-30}
[ $# -gt 0 ] && shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || for file in "$EPIKV_ROOT"/tests/fuzz/*_fuzz.cc; do
  targets+=("$(basename "$file" .cc)")
done

preset() { [ "$1" = model_fuzz ] && echo fuzz-torch || echo fuzz; }

install_packages
fetch_xgrammar
cd "$EPIKV_ROOT"
export CCACHE_DIR=${CCACHE_DIR:-$EPIKV_ROOT/build/ccache}
for tree in fuzz fuzz-torch; do
  of_tree=()
  for target in "${targets[@]}"; do
    [ "$(preset "$target")" = $tree ] && of_tree+=("$target")
  done
  [ ${#of_tree[@]} -gt 0 ] || continue
  [ $tree = fuzz ] || use_torch
  stage "configure $tree" cmake --preset $tree
  stage "build $tree" cmake --build build/$tree -j "$EPIKV_JOBS" --target "${of_tree[@]}"
done

# Of a process, beyond its memory; and which of these libFuzzer makes itself.
effects=open,openat,creat,truncate,unlink,unlinkat,rename,renameat,mkdir,mkdirat,link,symlink,chmod,socket,connect,execve
harmless='resumed>|llvm-symbolizer|O_RDONLY|"(\.\/)?build\/fuzz|"\/tmp\/libFuzzerTemp|"\/dev\/null"|"\/bin\/sh"'
# Small: a target allocates little, and many times.
asan=quarantine_size_mb=16:malloc_context_size=8:${ASAN_OPTIONS:-}
failed=0
for target in "${targets[@]}"; do
  found=build/fuzz/corpus/$target crashes=build/fuzz/crashes/$target kept=tests/fuzz/corpus/$target
  log=$EPIKV_LOGS/$target.log
  mkdir -p "$found" "$crashes"
  before=$(find "$kept" -type f | wc -l)
  program=build/$(preset "$target")/tests/fuzz/$target longest=2048 most_mb=2048
  export ASAN_OPTIONS=$asan
  # LibTorch leaks some of a graph that it could not finish: kilobytes of each, and no weights.
  [ "$target" = model_fuzz ] && longest=65536 most_mb=4096 ASAN_OPTIONS=$asan:detect_leaks=0
  # What a model file's code might do if it ran: nothing but what is written below build/fuzz.
  watch=()
  rm -f "$log.calls"
  if [ "$target" = model_fuzz ]; then
    watch=(strace -f --seccomp-bpf -qq -e signal=none -e "trace=$effects" -o "|awk '/epikv-canary/ || !/$harmless/' >$log.calls")
  fi
  status=0
  # Each process of -fork is a core; a crash ends one of them and is kept.
  "${watch[@]}" "$program" -fork="$EPIKV_JOBS" -ignore_crashes=1 -ignore_timeouts=1 -ignore_ooms=1 \
    -max_total_time=$((minutes * 60)) -timeout=10 -rss_limit_mb=$most_mb -max_len=$longest -print_funcs=0 \
    -dict="tests/fuzz/dict/$target.dict" -artifact_prefix="$crashes/" "$found" "$kept" >"$log" 2>&1 ||
    status=$?
  # By edges alone: with counters of how often, ten times as many would be kept.
  "$program" -set_cover_merge=1 -use_counters=0 "$kept" "$found" >>"$log" 2>&1
  # What a model file says that it needs. Without the sanitizer it gets it, or std::bad_alloc, which is
  # told; its code may ask for as much.
  if [ "$target" = model_fuzz ]; then
    for input in "$crashes"/*; do
      ("$program" -rss_limit_mb=$most_mb "$input" 2>&1 || true) >"$log.input"
      if grep -aqE 'out-of-memory|allocation-size-too-big' "$log.input"; then rm "$input"; fi
    done
  fi
  # 71: an input took too much memory. Those of model_fuzz that must not are still among its crashes.
  [ $status -eq 0 ] || { [ $status -eq 71 ] && [ "$target" = model_fuzz ]; } || failed=1
  [ -z "$(ls -A "$crashes")" ] || failed=1
  [ ! -s "$log.calls" ] || { echo "$target: more than libFuzzer does itself, in $log.calls:" && head "$log.calls" && failed=1; }
  printf '%-16s %s; kept %d + %d, crashes %d\n' "$target" "$(grep -a '^#[0-9]*: cov' "$log" | tail -n 1)" \
    "$before" $(($(find "$kept" -type f | wc -l) - before)) "$(find "$crashes" -type f | wc -l)"
done
exit $failed
