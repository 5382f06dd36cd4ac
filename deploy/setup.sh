# Sourced by deploy/quickstart.sh and tests/*.sh: installs what is missing and builds.
#
# Settings (environment):
#   EPIKV_TORCH_INDEX   pip index to take the torch wheel from, e.g. PyTorch's own index of CPU
#                       builds; default: pip's own configuration. Its wheel must be one of those
#                       in tools/requirements/torch-*.txt: add the hash of another
#   EPIKV_JOBS          compiler processes; default: 2, or the number of CPUs if fewer
#   EPIKV_SKIP_APT=1    the packages are there under other names; do not look

set -euo pipefail
EPIKV_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
EPIKV_VENV=$EPIKV_ROOT/.venv
EPIKV_PYTHON=$EPIKV_VENV/bin/python
EPIKV_REQUIREMENTS=$EPIKV_ROOT/tools/requirements  # what is fetched, by hash
EPIKV_LOGS=$EPIKV_ROOT/build/logs
EPIKV_JOBS=${EPIKV_JOBS:-$(($(nproc) < 2 ? 1 : 2))}
TORCH_VERSION=$(sed -n 's/^torch==\([^ +]*\).*/\1/p' "$EPIKV_REQUIREMENTS/torch-cpu.txt")

# What the daemon is built from, and the tools of the build.
EPIKV_PACKAGES=(
  ca-certificates ccache cmake g++ libabsl-dev libboost-math1.81-dev libgmock-dev libgrpc++-dev
  libgtest-dev libhwy-dev libmimalloc-dev libpcre2-dev libpq-dev libprotobuf-dev librandom123-dev
  libsqlite3-dev libssl-dev libutf8proc-dev ninja-build nlohmann-json3-dev pkg-config prometheus-cpp-dev protobuf-compiler
  protobuf-compiler-grpc python3 python3-venv
)

fail() {  # what happened; what to do
  printf '\nerror: %s\n  %s\n' "$1" "$2" >&2
  exit 1
}

# stage NAME COMMAND...: runs it with its output in a log, and shows the last line and the time.
stage() {
  local name=$1 log begin=$SECONDS pid
  shift
  mkdir -p "$EPIKV_LOGS"
  log=$EPIKV_LOGS/${name// /-}.log
  "$@" >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    if [ -t 1 ]; then
      printf '\r\033[K%-24s %4d s  %.70s' "$name" $((SECONDS - begin)) "$(tail -n 1 "$log" | tr -d '\r')"
    elif [ $(((SECONDS - begin) % 30)) -eq 29 ]; then
      printf '%-24s %4d s  %.70s\n' "$name" $((SECONDS - begin)) "$(tail -n 1 "$log" | tr -d '\r')"
    fi
    sleep 1
  done
  [ -t 1 ] && printf '\r\033[K'
  if ! wait "$pid"; then
    tail -n 25 "$log" >&2
    fail "$name failed after $((SECONDS - begin)) s" "the whole output is in $log"
  fi
  printf '%-24s %4d s\n' "$name" $((SECONDS - begin))
}

install_packages() {
  local missing=() package
  [ "${EPIKV_SKIP_APT:-}" = 1 ] && return 0
  command -v dpkg-query >/dev/null || fail "this is not a Debian system" \
    "install the equivalents of: ${EPIKV_PACKAGES[*]}; then set EPIKV_SKIP_APT=1"
  for package in "${EPIKV_PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  [ "$(id -u)" -eq 0 ] || fail "packages are missing: ${missing[*]}" \
    "run as root: apt-get install ${missing[*]}"
  stage "package lists" apt-get update
  stage "Debian packages" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
}

pip() { "$EPIKV_PYTHON" -m pip --disable-pip-version-check "$@"; }

# install_locked FILES AND OPTIONS: wheels whose hashes are in the files. Nothing is built, for what builds would
# be fetched without a hash.
install_locked() { pip install --require-hashes --only-binary :all: "$@"; }

make_venv() {
  [ -x "$EPIKV_PYTHON" ] || stage "virtual environment" python3 -m venv "$EPIKV_VENV"
}

# Sets EPIKV_XGRAMMAR_SDIST, and fetches it if need be. pip knows index, proxy and certificates; it runs the
# archive's build backend for its name and version, and builds nothing.
fetch_xgrammar() {
  local wanted=$EPIKV_REQUIREMENTS/xgrammar.txt folder=$EPIKV_ROOT/build/sources version sha256
  version=$(sed -n 's/^xgrammar==\([^ ]*\).*/\1/p' "$wanted")
  sha256=$(sed -n 's/.*--hash=sha256:\([0-9a-f]*\).*/\1/p' "$wanted")
  export EPIKV_XGRAMMAR_SDIST=$folder/xgrammar-$version.tar.gz
  [ -f "$EPIKV_XGRAMMAR_SDIST" ] &&
    sha256sum --check --status <<<"$sha256  $EPIKV_XGRAMMAR_SDIST" && return 0
  make_venv
  mkdir -p "$folder"
  stage "build backends" install_locked -r "$EPIKV_REQUIREMENTS/build.txt"
  stage "xgrammar $version" pip download --require-hashes --no-deps --no-binary xgrammar --no-build-isolation \
    --dest "$folder" -r "$wanted"
}

# LibTorch, which the build needs, again when its version has changed.
install_torch() {
  local index=()
  [ -f "$EPIKV_VENV/torch.stamp" ] && [ "$(cat "$EPIKV_VENV/torch.stamp")" = "$TORCH_VERSION" ] && return 0
  make_venv
  [ -n "${EPIKV_TORCH_INDEX:-}" ] && index=(--index-url "$EPIKV_TORCH_INDEX")
  stage "LibTorch $TORCH_VERSION" install_torch_wheel "${index[@]}"
  echo "$TORCH_VERSION" >"$EPIKV_VENV/torch.stamp"
}

# The CPU build where the index has one. Alone: an index of torch builds need not have the other packages.
install_torch_wheel() {
  local said
  said=$(install_locked --no-deps -r "$EPIKV_REQUIREMENTS/torch-cpu.txt" "$@" 2>&1 | tee >(cat >&2)) && return 0
  grep -q 'No matching distribution found' <<<"$said" || return 1
  install_locked --no-deps -r "$EPIKV_REQUIREMENTS/torch-cuda.txt" "$@"
}

# All other Python packages, again when what they depend on has changed.
install_tools() {
  local stamp wanted
  stamp=$EPIKV_VENV/epikv.stamp
  wanted=$( (cat "$EPIKV_ROOT"/tools/pyproject.toml "$EPIKV_ROOT"/tools/setup.py \
    "$EPIKV_ROOT"/tools/lab/pyproject.toml \
    "$EPIKV_REQUIREMENTS"/*.txt "$EPIKV_ROOT"/proto/epikv/v1/*.proto
    grep '^project' "$EPIKV_ROOT/CMakeLists.txt") | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
  stage "Python packages" install_locked -r "$EPIKV_REQUIREMENTS/tools.txt"
  # Nothing is fetched here: what builds them is among those packages.
  stage "epikv" pip install --no-index --no-deps --no-build-isolation \
    -e "$EPIKV_ROOT/tools" -e "$EPIKV_ROOT/tools/lab"
  stage "check of packages" pip check
  echo "$wanted" >"$stamp"
}

# LibTorch of the Python package, for cmake.
use_torch() {
  install_torch
  EPIKV_TORCH_DIR=$("$EPIKV_PYTHON" -c \
    'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin))')
  export EPIKV_TORCH_DIR EPIKV_PYTHON
  # Some indexes give a CUDA build of several GB under the same name: say which one it is.
  printf '%-24s %s\n' "torch wheel" "$(pip list --format=freeze 2>/dev/null | grep '^torch=')"
}

# prepare: packages, LibTorch, configured build tree (in build/dev). What a build needs, and no more.
prepare() {
  install_packages
  use_torch
  fetch_xgrammar
  cd "$EPIKV_ROOT"
  export CCACHE_DIR=${CCACHE_DIR:-$EPIKV_ROOT/build/ccache}
  stage "configure" cmake --preset dev
}

# setup: that and the Python packages.
setup() {
  prepare
  install_tools
}

build() {  # targets; none: all
  local targets=()
  [ $# -gt 0 ] && targets=(--target "$@")
  stage "build" cmake --build "$EPIKV_ROOT/build/dev" -j "$EPIKV_JOBS" "${targets[@]}"
}
