#!/usr/bin/env bash
# Tests and measures `--device=cuda` on a machine with a GPU, a bare one too: it needs Python, the very torch with CUDA
# whose wheel is named below, and transformers. This machine needs CUDA's headers (NVIDIA's package cuda-cudart-dev).
#
#   gpu.sh pack torch-2.11.0-*.whl [3.12]
#                             here: builds against that wheel, of the torch that is there, and packs what the other
#                             machine lacks, its Python being a 3.12, into build/gpu/pack.tar.xz
#   gpu.sh PART ...           there, in a checkout that has that file: unpacks it, and runs in turn
#     tests                   gpu_test: the kernel, and whole engines
#     families                every family that can be exported, served in bf16, against transformers
#     memcheck                a part of gpu_test under compute-sanitizer
#     limit SHAPE SHARE,..    a daemon whose KV pool is a share of the GPU's memory, and full of requests
#     steps SHAPE CACHED STREAMS,.. POLICY,..
#                             where a step's time goes, of random weights of epikv_lab.export.large's shape
#     peer SHAPE CACHED STREAMS,..
#                             the same steps by transformers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
pack=build/gpu/pack

# locked NAME...: their versions and hashes.
locked() {
  local name
  for name in "$@"; do
    awk -v own="$name==" '/^[^ ]/ { takes = index($0, own) == 1 } takes && !/#/' tools/requirements/tools.txt
  done
}

pack() {
  local wheel=$1 python=${2:-3.12} torch
  torch=build/gpu/$(basename "$wheel" .whl)
  source deploy/setup.sh
  setup
  [ -d "$torch" ] || python3 -m zipfile -e "$wheel" "$torch"
  # CUDA's own libraries are not here, and nothing of theirs is needed to link.
  EPIKV_TORCH_DIR=$root/$torch/torch cmake --preset dev -B build/gpu/build \
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined
  cmake --build build/gpu/build -j2 --target epikvd gpu_test step_times epikv_cuda
  rm -rf "$pack"
  mkdir -p "$pack"/{bin,lib,models,python}
  for program in server/epikvd tests/gpu_test tests/step_times; do
    strip -o "$pack/bin/${program#*/}" "build/gpu/build/$program"
  done
  strip -o "$pack/lib/libepikv_cuda.so" build/gpu/build/runtime/libepikv_cuda.so
  cp build/gpu/build/models/{gqa_bf16,wide_bf16,wide_fp16}.pt "$pack/models"
  # Debian's libraries, but for those of the C and C++ runtimes, which every machine has; and not torch's own nor CUDA's.
  ldd "$pack"/bin/* | sed -n 's/^\s*\(\S*\) => \(\S*\) .*/\2/p' | sort -u |
    grep -v -e '/torch' -e '/cuda' -e '/\(libc\|libm\|libdl\|librt\|libpthread\|libstdc++\|libgcc_s\|libgomp\)\.so' |
    xargs -I{} cp -L {} "$pack/lib"
  strip "$pack"/lib/*
  cp -r tools/epikv tools/lab/epikv_lab "$pack/python"
  locked click grpcio grpcio-health-checking grpcio-status protobuf googleapis-common-protos >"$pack/python.txt"
  pip download -q --require-hashes --no-deps --only-binary :all: --python-version "$python" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$pack/wheels" -r "$pack/python.txt"
  for wheel in "$pack"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$pack/python"; done
  rm -r "$pack/wheels"
  tar -C build/gpu -I 'xz -T0' -cf "$pack.tar.xz" pack
  ls -l "$pack.tar.xz"
}

unpack() {
  local torch
  torch=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__))')
  where=$(mktemp -d)
  tar -C "$where" -xJf "$pack.tar.xz"
  where+=/pack
  LD_LIBRARY_PATH=$where/lib:$torch/lib:$(find "$torch/../nvidia" -type d -name lib -printf '%p:' 2>/dev/null)
  export LD_LIBRARY_PATH EPIKV_TEST_MODELS=$where/models EPIKVD=$where/bin/epikvd PYTHONPATH=$where/python
  export OMP_WAIT_POLICY=PASSIVE TMPDIR=${TMPDIR:-/dev/shm}
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
}

# By so many processes at once: a tiny model leaves a GPU idle.
tests() {
  local shards=8 shard failed=0 pids=()
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$where/bin/gpu_test" --gtest_brief=1 \
      >"$where/shard-$shard.log" 2>&1 &
    pids+=($!)
  done
  for shard in "${!pids[@]}"; do
    wait "${pids[shard]}" || failed=1
    grep -A 12 ': Failure' "$where/shard-$shard.log" | grep -v '^frame' | head -40 || true
    grep -E '^\[ +(PASSED|SKIPPED|FAILED)' "$where/shard-$shard.log" | tail -20
  done
  return $failed
}

families() { python3 -m epikv_lab.export.sweep --dtype bf16 --device cuda --configurations 6; }

memcheck() {
  compute-sanitizer --tool memcheck --print-limit 5 --error-exitcode 3 "$where/bin/gpu_test" --gtest_brief=1 \
    --gtest_filter='GpuPool.*:GpuTogether.GivesWhatTheCpuGives:*EvictionIsTheMask/wide_bf16_H2o'
}

# model SHAPE: its file, of random weights.
model() {
  local file=$TMPDIR/epikv-$1.pt
  [ -f "$file" ] || python3 - "$1" "$file" <<'PYTHON'
import sys, tempfile
from pathlib import Path
from epikv.export.exporter import export
from epikv.export.synthetic import write_directory
from epikv_lab.export.large import SHAPES
with tempfile.TemporaryDirectory() as folder:
    write_directory(SHAPES[sys.argv[1]], Path(folder), "bfloat16", device="cuda")
    export(Path(folder), Path(sys.argv[2]), dtype="bfloat16", name=sys.argv[1], check=False)
PYTHON
  echo "$file"
}

case ${1:-} in
  pack) pack "${@:2}" && exit ;;
esac
unpack
failed=0
while [ $# -gt 0 ]; do
  part=$1 && shift
  begin=$SECONDS
  echo "== $part ${*:1:4}"
  case $part in
    tests | families | memcheck) "$part" || failed=1 ;;
    limit) python3 tests/bench/gpu_limit.py "$(model "$1")" "$2" || failed=1 && shift 2 ;;
    steps) "$where/bin/step_times" "$(model "$1")" cuda "${@:2:3}" || failed=1 && shift 4 ;;
    peer) python3 tests/bench/gpu_peer.py "${@:1:3}" || failed=1 && shift 3 ;;
    *) echo "gpu.sh: no part '$part'; see its head" >&2 && exit 2 ;;
  esac
  echo "== $((SECONDS - begin)) s"
done
exit $failed
