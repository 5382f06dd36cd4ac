"""Writes and reads model files: a scripted module with its manifest and tokenizer inside."""

import os
import warnings
from pathlib import Path

import torch

from epikv.export import checkpoint, contract, parity
from epikv.export.decoder import build
from epikv.export.errors import ExportError
from epikv.export.manifest import Manifest

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # short names, for command lines


def export(
    directory: Path,
    out: Path,
    *,
    dtype: str | None = None,
    name: str | None = None,
    calibration: Path | None = None,
    check: bool = True,
) -> parity.Report | None:
    """Writes the model in `directory` to `out`, after comparing it with transformers.

    `dtype` is "float32" or "bfloat16" (default: as stored); `name` defaults to the directory's;
    `check` may skip the comparison, which loads the model twice more. `out` appears whole or not
    at all. Raises ExportError, naming the field that cannot be exported or the error measured.
    """
    source = checkpoint.read(Path(directory), calibration)
    dtype = dtype or source.dtype()
    manifest = source.manifest(name or Path(directory).resolve().name, dtype)
    try:
        module = build(source.shape(dtype), source.weights(), getattr(torch, dtype))
    except RuntimeError as error:
        raise ExportError(f"{directory}: {error}") from error
    out = Path(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.script(module).save(
                str(temporary),
                _extra_files={
                    "manifest.json": manifest.to_json(),
                    "tokenizer.json": source.tokenizer,
                },
            )
        del module
        report = _check(temporary, source.directory if check else None)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return report


def load(path: Path) -> tuple[torch.jit.ScriptModule, Manifest, str]:
    """The module, manifest and tokenizer.json of an exported file."""
    extra = {"manifest.json": "", "tokenizer.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path), map_location="cpu", _extra_files=extra)
    texts = {k: v.decode() if isinstance(v, bytes) else v for k, v in extra.items()}
    return module, Manifest.from_json(texts["manifest.json"]), texts["tokenizer.json"]


def _check(path: Path, directory: Path | None) -> parity.Report | None:
    """Holds the file as written against the contract and, given its directory, transformers."""
    module, manifest, _ = load(path)
    broken = contract.violations(module, len(manifest.layers))
    if broken:
        raise ExportError("the scripted module breaks the contract: " + "; ".join(broken))
    if directory is None:
        return None
    report = parity.compare(module, manifest, directory)
    if not report.passed():
        raise ExportError(f"not the same model as in transformers; nothing was written. {report}")
    return report
