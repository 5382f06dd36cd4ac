"""Artefacts: what a policy must know of one model and no request can tell it. Measured once, written
as JSON, and loaded by the daemon at start (policies/artefact.h)."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from epikv.export.manifest import Manifest

FORMAT = "epikv.artefact/1"


def write(
    path: Path,
    policy: str,
    manifest: Manifest,
    *,
    params: dict[str, Any] | None = None,
    data: Any = None,
    made_with: dict[str, Any],
) -> None:
    """Writes what `policy` takes: defaults of its parameters on this model, or data of its own.

    Raises ValueError if the model file does not say which weights it holds.
    """
    if manifest.weights is None:
        raise ValueError("the model file does not say which weights it holds: export it again")
    artefact: dict[str, Any] = {
        "format": FORMAT,
        "policy": policy,
        "model": {"name": manifest.name, "weights": manifest.weights},
    }
    if params is not None:
        artefact["params"] = params
    if data is not None:
        artefact["data"] = data
    artefact["made_with"] = {"epikv": version("epikv"), **made_with}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(artefact) + "\n", "utf-8")
