#!/usr/bin/env bash
# Builds the engine for aarch64 and runs its C++ tests under QEMU's emulator of a Neoverse N1:
#
#   bash tests/aarch64.sh [TARGET...]
#
# The targets are programs of tests; without one, those that need no LibTorch: kernels, tokenizers, constraints, the
# engine. The laws would take hours. The server is not built. It needs Debian, and root for packages; the rest goes to
# build/aarch64-root.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"
EPIKV_PACKAGES+=(debootstrap g++-aarch64-linux-gnu qemu-user unzip)
root=$EPIKV_ROOT/build/aarch64-root
wanted=libabsl-dev,libc6-dev,libgmock-dev,libgtest-dev,libhwy-dev,libpcre2-dev,librandom123-dev
wanted+=,libstdc++-12-dev,libutf8proc-dev,nlohmann-json3-dev,zlib1g-dev

# Debian's packages of another processor, unpacked: none of their scripts can run here.
fetch_packages() {
  debootstrap --arch=arm64 --variant=minbase --download-only --include="$wanted" bookworm "$root.debs"
  for deb in "$root.debs"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$deb" "$root"; done
}

# LibTorch of the same version. Where an index has only its CUDA build, libtorch_cpu.so wants two of CUDA's libraries.
fetch_torch() {
  local folder=$root.wheels platforms=() platform
  for platform in manylinux_2_28 manylinux_2_27 manylinux_2_25 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_aarch64")
  done
  fetch() {  # file of requirements
    pip download --no-deps --require-hashes --only-binary :all: "${platforms[@]}" --dest "$folder" -r "$1"
  }
  if ! fetch "$EPIKV_REQUIREMENTS/torch-cpu.txt"; then
    mkdir -p "$folder"
    awk '/^[a-z]/ { wanted = /^(torch|nvidia-cuda-cupti|nvidia-cuda-runtime)==/ } wanted' \
      "$EPIKV_REQUIREMENTS/torch-cuda.txt" >"$folder/wanted.txt"
    fetch "$folder/wanted.txt"
  fi
  mkdir -p "$root/opt"
  unzip -q -o "$folder"/torch-*.whl 'torch/include/*' 'torch/lib/*' -x '*libtorch_cuda*' '*libtorch_python*' '*nvshmem*' -d "$root/opt"
  for wheel in "$folder"/nvidia*.whl; do
    [ ! -f "$wheel" ] || unzip -q -o -j "$wheel" '*.so*' -d "$root/opt/torch/lib"
  done
}

setup
if [ ! -f "$root/done" ]; then
  stage "arm64 packages" fetch_packages
  stage "LibTorch for arm64" fetch_torch
  touch "$root/done"
fi
cd "$EPIKV_ROOT"
export EPIKV_TORCH_DIR=$root/opt/torch
stage "configure" cmake --preset aarch64
[ $# -gt 0 ] || set -- runtime_test policy_values_test
stage "build" cmake --build build/aarch64 --parallel "$EPIKV_JOBS" --target "$@"
ctest --test-dir build/aarch64 -R "^($(IFS='|' && echo "$*"))(_[0-9]+)?\$" --output-on-failure -j "$EPIKV_JOBS" \
  --timeout 3000
