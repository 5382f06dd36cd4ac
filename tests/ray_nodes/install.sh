#!/usr/bin/env bash
# Puts Ray in build/ray, with what epikv needs beside it: an environment of its own, as Ray is large.
#
#   bash tests/ray_nodes/install.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../deploy/setup.sh"
folder=$EPIKV_ROOT/build/ray
wanted=$(cat "$EPIKV_REQUIREMENTS"/{ray,uv}.txt | sha256sum)
[ -f "$folder/stamp" ] && [ "$(cat "$folder/stamp")" = "$wanted" ] && exit 0
python3 -m venv --clear "$folder"
EPIKV_PYTHON=$folder/bin/python
install_locked -r "$EPIKV_REQUIREMENTS/uv.txt"
# As pip, it trusts whom the machine trusts; but it does not know pip's settings, such as another index.
export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}}
"$folder/bin/uv" pip install --python "$EPIKV_PYTHON" --require-hashes --only-binary :all: --no-deps --compile-bytecode \
  -r "$EPIKV_REQUIREMENTS/ray.txt" || install_locked --no-deps -r "$EPIKV_REQUIREMENTS/ray.txt"
pip check
echo "$wanted" >"$folder/stamp"
