#!/usr/bin/env bash
# Builds the images of the Dockerfile without a Docker engine and tries them: bash tests/container.sh,
# as root on Debian 12. Takes 10 GB below build/container, which are gone afterwards, and a quarter
# of an hour on two cores, 20 minutes more while the compiler's cache, which stays, is cold: no part
# of run.sh. The base image is made by debootstrap from the mirror of this machine's apt. What is
# tried: tests/container/try_image.py and try_gateway.py.
#
# Settings (environment), beside deploy/setup.sh's:
#   EPIKV_TORCH_INDEX    index of CPU builds of torch; file:///FOLDER also works (PEP 503).
#                        Default: the Dockerfile's, PyTorch's own
#   EPIKV_CONTAINER_DIR  instead of build/container
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/setup.sh"

EPIKV_PACKAGES+=(buildah debootstrap iproute2)
command -v npm >/dev/null || EPIKV_PACKAGES+=(nodejs npm)
install_packages
install_torch
install_tools
stage "Kubernetes" bash "$EPIKV_ROOT/tests/kubernetes/install.sh"
cd "$EPIKV_ROOT"

work=${EPIKV_CONTAINER_DIR:-$EPIKV_ROOT/build/container}
mkdir -p "$work/tmp"
exec {lock}>"$work/lock"
flock --nonblock "$lock" || fail "another run is using $work" "wait for it"
export BUILDAH_ISOLATION=chroot TMPDIR=$work/tmp
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }
# The compiler's cache, buildah's cache mount in tmp, stays.
clean() {
  buildah rm --all >/dev/null 2>&1 || true
  rm -rf --one-file-system "$work/base" "$work/storage" "$work/run"
}
trap clean EXIT
clean

# debian:bookworm-slim in all but its date: no recommended packages, no documentation.
make_base() {
  local targets mirror container
  targets=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
    grep -E '^bookworm(-updates|-security)? ' | sort -u)
  mirror=$(awk '$1 == "bookworm" { print $2; exit }' <<<"$targets")
  [ -n "$mirror" ] || fail "apt has no mirror of bookworm" "this needs Debian 12"
  # Its mounts end with this namespace.
  unshare --mount debootstrap --variant=minbase bookworm "$work/base" "$mirror"
  awk '{ print "deb", $2, $1, "main" }' <<<"$targets" >"$work/base/etc/apt/sources.list"
  printf 'path-exclude %s\n' '/usr/share/doc/*' '/usr/share/man/*' '/usr/share/locale/*' \
    '/usr/share/info/*' >"$work/base/etc/dpkg/dpkg.cfg.d/slim"
  rm -rf --one-file-system "$work"/base/usr/share/{doc,man,locale,info}/* \
    "$work"/base/var/{cache/apt/archives/*.deb,lib/apt/lists/*,log/*}
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$work/base" /
  buildah commit --quiet --rm "$container" epikv-base
}

build_image() {  # TARGET TAG
  local arguments=(--build-arg BASE=localhost/epikv-base --build-arg JOBS="$EPIKV_JOBS"
    --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)")
  if [ -n "${EPIKV_TORCH_INDEX:-}" ]; then
    arguments+=(--build-arg TORCH_INDEX="$EPIKV_TORCH_INDEX")
    case $EPIKV_TORCH_INDEX in
      file://*) arguments+=(--volume "${EPIKV_TORCH_INDEX#file://}:${EPIKV_TORCH_INDEX#file://}:ro") ;;
    esac
  fi
  # Whom this machine trusts, for an index behind a proxy.
  printf '[global]\ncert = /run/secrets/ca.pem\n' >"$work/pip.conf"
  buildah build --format docker --pull-never "${arguments[@]}" \
    --secret id=pip.conf,src="$work/pip.conf" \
    --secret id=ca.pem,src="${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" --target "$1" --tag "$2" .
}

stage "base image" make_base
stage "image of the gateway" build_image gateway epikv-gateway
root=$(buildah mount "$(buildah from --pull-never epikv-gateway)")
buildah inspect --type image --format '{{.Config}}' epikv-gateway >"$work/config.json"
"$EPIKV_PYTHON" "$EPIKV_ROOT/tests/container/try_gateway.py" --root "$root" --config "$work/config.json"

stage "image" build_image runtime epikvd

sample=$EPIKV_ROOT/tools/sample_model/$(cat "$EPIKV_ROOT/tools/sample_model/SHIPPED")
mkdir -p "$work/models"
stage "export" "$EPIKV_VENV/bin/epikv" export "$sample" "$work/models/model.pt" --name sample --dtype fp32

container=$(buildah from --pull-never epikvd)
root=$(buildah mount "$container")
buildah inspect --type image --format '{{.Config}}' epikvd >"$work/config.json"
"$EPIKV_PYTHON" "$EPIKV_ROOT/tests/container/try_image.py" --root "$root" \
  --config "$work/config.json" --models "$work/models"

printf '\nlayers\n'
buildah inspect --type image --format '{{.Manifest}}' epikvd |
  "$EPIKV_PYTHON" -c 'import json, sys
for layer in json.load(sys.stdin)["layers"]: print("%8.1f MB" % (layer["size"] / 1e6), layer["digest"])'
printf 'of the files\n'
for part in / /opt/libtorch /usr/local/bin; do
  printf '%8s    %s\n' "$(du -s --apparent-size --block-size=MB "$root$part" | cut -f 1)" "$part"
done
