"""Artefacts: what a policy must know of one model and no request can tell it. Measured once, written
as JSON, and loaded by the daemon at start (policies/artefact.h)."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epikv.export.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "epikv.artefact/1"


def write(
    path: Path,
    policy: str,
    manifest: Manifest,
    *,
    params: dict[str, Any] | None = None,
    data: Any = None,
    arrays: Mapping[str, "Tensor"] | None = None,
    made_with: dict[str, Any],
) -> None:
    """Writes what `policy` takes: defaults of its parameters on this model, or data of its own, and
    arrays in a safetensors file beside it.

    Raises ValueError if the model file does not say which weights it holds, or a number is not one.
    """
    check(manifest)
    artefact: dict[str, Any] = {
        "format": FORMAT,
        "policy": policy,
        "model": {"name": manifest.name, "weights": manifest.weights},
    }
    if params is not None:
        artefact["params"] = params
    if data is not None:
        artefact["data"] = data
    path.parent.mkdir(parents=True, exist_ok=True)
    if arrays is not None:
        from safetensors.torch import save

        beside = path.with_suffix(".safetensors")
        # Not save_file, whose files nobody else may read: the daemon is often somebody else.
        told = {"policy": policy, "weights": str(manifest.weights)}
        beside.write_bytes(save(dict(arrays), told))
        artefact["arrays"] = beside.name
    artefact["made_with"] = {"epikv": version("epikv"), **made_with}
    path.write_text(json.dumps(artefact, allow_nan=False) + "\n", "utf-8")


def check(manifest: Manifest) -> None:
    """Raises ValueError unless artefacts can be made of the model."""
    if manifest.weights is None:
        raise ValueError("the model file does not say which weights it holds: export it again")
