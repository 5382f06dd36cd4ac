"""Writes and reads model files: a module with its manifest, tokenizer and chat formats."""

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from epikv.export import chat, checkpoint, compiled, contract, operators, parity
from epikv.export.decoder import build
from epikv.export.errors import ExportError
from epikv.export.manifest import Manifest
from epikv.export.quantize import QUANTIZATIONS

# Short names, for command lines.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Told what is being done, and of how many bytes how many are done; of 0: not known.
Progress = Callable[[str, int, int], object]


def _nobody(stage: str, done: int, total: int) -> None:
    """Tells no one."""


_NO_CHAT = chat.Refusal("the model was saved without a chat template")


def export(
    directory: Path,
    out: Path,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    name: str | None = None,
    calibration: Path | None = None,
    compile: bool = False,
    check: bool = True,
    progress: Progress = _nobody,
) -> parity.Report | None:
    """Writes the model in `directory` to `out`, after comparing it with transformers.

    The file is of TorchScript or, with `compile`, what AOTInductor makes of the model for
    processors of this machine's kind (epikv.export.compiled).
    `dtype` is one of DTYPES' values (default: as stored), and `quantization` one of QUANTIZATIONS
    (default: none); `name` defaults to the directory's;
    `check` may skip the comparison, which loads the model twice more, one after the other. `out`
    appears whole or not at all. In memory is the model, and of a shard what is read of it. Raises
    ExportError, naming the field that cannot be exported or the error measured.
    """
    out = Path(out)
    reading = _Reading(progress)
    source = checkpoint.read(Path(directory), calibration, reading.add)
    reading.total = 2 * source.stored.nbytes()  # for the digest and for the module
    dtype = dtype or source.dtype()
    name = name or Path(directory).resolve().name
    manifest = source.manifest(name, dtype, quantization)
    linears = QUANTIZATIONS[quantization] if quantization else None
    try:
        with _whole(out) as temporary:
            module = build(source.shape(dtype), source.weights(), getattr(torch, dtype), linears)
            progress("trying the chat template", 0, 0)
            told = _extras(manifest, source.tokenizer, source.chat(), source.chat_template())
            _write(module, told, temporary, progress, compile=compile)
            del module
            gc.collect()  # scripting leaves cycles, which would hold the weights when loading
            return _check(temporary, manifest, source.directory if check else None, progress)
    except RuntimeError as error:  # torch's of a tensor or a full disk
        raise ExportError(f"{directory}: {error}") from error


def save(
    module: torch.nn.Module,
    manifest: Manifest,
    tokenizer: str,
    out: Path,
    chat_formats: chat.ChatFormats | chat.Refusal = _NO_CHAT,
    *,
    compile: bool = False,
) -> None:
    """Writes a module of one's own as the file that the daemon serves.

    `module` keeps the model contract: it can be scripted, its forward takes (token_ids, positions,
    last) and calls the two operators of `epikv.export.operators`, and its weights are of
    `manifest.dtype`. `tokenizer` is the text of a tokenizer.json, and `chat_formats` what
    `epikv.export.chat.derive` makes of a chat template. `compile`: as in `export`. `out` appears
    whole or not at all. Raises ExportError, naming everything that breaks the contract.
    """
    out = Path(out)
    with _whole(out) as temporary:
        try:
            told = _extras(manifest, tokenizer, chat_formats)
            _write(module.eval().requires_grad_(False), told, temporary, compile=compile)
            _check(temporary, manifest, None)
        except RuntimeError as error:  # the compiler's, or of a full disk
            raise ExportError(f"{out}: {error}") from error


def load(path: Path) -> tuple[torch.jit.ScriptModule, Manifest, str]:
    """The module, manifest and tokenizer.json of an exported file. Raises ExportError of a compiled
    one, which has no module."""
    if compiled.is_compiled(path):
        raise ExportError(
            f"{path} is compiled: take the file that --no-compile writes of the model"
        )
    extra = {"manifest.json": "", "tokenizer.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path), map_location="cpu", _extra_files=extra)
    texts = {k: v.decode() if isinstance(v, bytes) else v for k, v in extra.items()}
    return module, Manifest.from_json(texts["manifest.json"]), texts["tokenizer.json"]


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A file beside `out`, which takes its place when the block ends well, else is removed."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _extras(
    manifest: Manifest,
    tokenizer: str,
    formats: chat.ChatFormats | chat.Refusal,
    template: str = "",
) -> dict[str, str]:
    """What a model file says beside its weights."""
    extras = {
        "manifest.json": manifest.to_json(),
        "tokenizer.json": tokenizer,
        "chat.json": chat.to_json(formats),
    }
    return {**extras, "chat_template.json": template} if template else extras


def _write(
    module: torch.nn.Module,
    extras: dict[str, str],
    path: Path,
    progress: Progress = _nobody,
    *,
    compile: bool,
) -> None:
    if compile:
        progress("compiling the model", 0, 0)
        compiled.write(module, extras, path)
        return
    with warnings.catch_warnings(), _growing(path, _nbytes(module), progress):
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path), _extra_files=extras)


class _Reading:
    """Reads of weights, as they add up."""

    def __init__(self, progress: Progress) -> None:
        self.total = 0
        self._done = 0
        self._progress = progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress("reading weights", self._done, self.total)


@contextmanager
def _growing(path: Path, nbytes: int, progress: Progress) -> Iterator[None]:
    """Tells how far a file of about `nbytes` has been written."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            written = path.stat().st_size if path.exists() else 0
            progress("writing the model", min(written, nbytes), nbytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _nbytes(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in (*module.parameters(), *module.buffers()))


def _check(
    path: Path, manifest: Manifest, directory: Path | None, progress: Progress = _nobody
) -> parity.Report | None:
    """Holds the file as written against the contract and, given its directory, transformers."""
    expected = None
    if directory is not None:
        progress("running it in transformers", 0, 0)
        expected = parity.expect(manifest, directory)
    progress("running what was written", 0, 0)
    module: operators.Module
    if compiled.is_compiled(path):
        module = compiled.read(path)
        broken = contract.missing_calls(module, manifest)
    else:
        module, manifest, _ = load(path)
        broken = contract.violations(module, len(manifest.layers))
    if broken:
        raise ExportError("the module breaks the contract: " + "; ".join(broken))
    if expected is None:
        return None
    report = parity.compare(module, manifest, expected)
    if not report.passed():
        raise ExportError(f"not the same model as in transformers; nothing was written. {report}")
    return report
