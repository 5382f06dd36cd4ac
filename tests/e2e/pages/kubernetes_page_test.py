"""The commands of docs/kubernetes.md make what the pod mounts, by kubectl where it needs no cluster. Docker, the rollout,
the forwarded port and the answer are played: they say what they were asked."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from kustomized import Object, one, tool
from page_blocks import ROOT, blocks
from shell import ENVIRONMENT

PAGE = "docs/kubernetes.md"
KUBECTL = """\
#!/bin/sh
case $1 in
  create) {kubectl} "$@" --dry-run=client --output=yaml >>made; echo --- >>made ;;
  apply) [ "$2" = -k ] && {kubectl} kustomize "$3" >>made ;;
  *) echo kubectl "$@" >>asked; [ "$1" != port-forward ] || exec sleep 60 ;;
esac
"""
PLAYED = '#!/bin/sh\nfor word in $(basename "$0") "$@"; do echo "$word"; done >>asked\n'
EPIKV = """\
#!/bin/sh
case $1 in
  token) exec {python} -c 'from epikv.cli import main; main()' "$@" ;;
  *) echo epikv "$EPIKV_TOKEN" "$@" >>asked ;;
esac
"""


def test_what_is_pasted_makes_what_the_pod_mounts(tmp_path: Path) -> None:
    [block] = [block for block in blocks(ROOT / PAGE) if block.has_commands]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("kubectl", KUBECTL.format(kubectl=tool("kubectl"))),
        ("docker", PLAYED),
        ("epikv", EPIKV.format(python=sys.executable)),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    done = subprocess.run(
        ["bash", "-euc", block.text],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")

    made: list[Object] = [
        each for each in yaml.safe_load_all((tmp_path / "made").read_text()) if each is not None
    ]
    namespace = one(made, "Namespace", "epikv")["metadata"]["name"]
    pod = one(made, "StatefulSet", "epikvd")
    assert {each["metadata"].get("namespace") for each in made} == {None, namespace}
    assert [each["kind"] for each in made if "namespace" not in each["metadata"]] == ["Namespace"]
    spec = pod["spec"]["template"]["spec"]
    secrets = [each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each]
    assert secrets == ["epikvd-tokens"]
    tokens = base64.b64decode(one(made, "Secret", "epikvd-tokens")["data"]["tokens"]).decode()

    asked = (tmp_path / "asked").read_text()
    [token] = [word for word in asked.split() if word.startswith("epikv-")]
    assert tokens == f"user ann {hashlib.sha256(token.encode()).hexdigest()}\n"
    assert f"epikv {token} generate" in asked
    assert "kubectl rollout status statefulset/epikvd --namespace epikv" in asked
    images = {each["image"] for each in [*spec["containers"], *spec["initContainers"]]}
    pushed = {word for word in asked.split() if word.startswith("registry.example/")}
    assert len(pushed) == 2 and pushed <= images
