"""A checkpoint as each peer wants it; made once, beside the checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

from epikv import harness

from epikv_lab.bench.peers import venvs
from epikv_lab.bench.peers.venvs import Refused, run

RUNNERS = Path(__file__).parent / "runners"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def openvino(checkpoint: Path, weights: str) -> Path:
    """weights: fp32 or int8."""

    def make(out: Path) -> None:
        program = "from optimum.commands.optimum_cli import main; main()"
        arguments = ["export", "openvino", "--model", str(checkpoint), "--weight-format", weights]
        arguments += ["--task", "text-generation-with-past", str(out)]
        interpreter = venvs.python("export", "openvino")
        run([str(interpreter), "-c", program, *arguments], "its export", env=_OFFLINE)

    return _made(checkpoint, f"openvino-{weights}", make)


def ctranslate2(checkpoint: Path, weights: str) -> Path:
    """weights: float32 or int8."""

    def make(out: Path) -> None:
        program = (  # it aborts when the interpreter ends
            "import os; from ctranslate2.converters.transformers import main; main(); os._exit(0)"
        )
        arguments = ["--model", str(checkpoint), "--output_dir", str(out), "--quantization"]
        interpreter = venvs.python("peers", "ctranslate2")
        run([str(interpreter), "-c", program, *arguments, weights], "its converter", env=_OFFLINE)

    return _made(checkpoint, f"ctranslate2-{weights}", make)


def onnx(checkpoint: Path, weights: str) -> Path:
    """weights: fp32, int8 or int4."""

    def make(out: Path) -> None:
        program = [str(venvs.python("peers", "onnxruntime")), "-m"]
        program += ["onnxruntime_genai.models.builder", "-e", "cpu", "-p", weights]
        cache = out.with_name(f"{out.name}-cache")
        try:
            run(
                [*program, "-i", str(checkpoint), "-o", str(out), "-c", str(cache)],
                "its model builder",
                env=_OFFLINE,
            )
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    return _made(checkpoint, f"onnx-{weights}", make)


def gguf(checkpoint: Path, weights: str) -> Path:
    """weights: f32, bf16 or q8_0."""

    def make(out: Path) -> None:
        sources = venvs.llama() / "sources" / "vendor" / "llama.cpp"
        interpreter = venvs.python("peers", "llama")
        program = [str(interpreter), str(RUNNERS / "to_gguf.py"), str(sources), str(checkpoint)]
        run([*program, str(out), weights], "its converter", env=_OFFLINE)

    return _made(checkpoint, f"{weights}.gguf", make)


def epikv(checkpoint: Path, dtype: str, quantization: str | None) -> Path:
    """dtype: float32 or bfloat16; quantization of the linears: None, int8 or int4."""
    from epikv.export import export

    weights = quantization or dtype
    path = harness.cached(f"peers-{checkpoint.name}-{weights}", {"checkpoint": checkpoint.name})
    if not path.exists():
        harness.say(f"exporting {path.name}")
        export(checkpoint, path, dtype=dtype, quantization=quantization, name="peers", check=False)
    return path


def _made(checkpoint: Path, name: str, make: Callable[[Path], None]) -> Path:
    """What make(path) writes, a file or a folder, which appears whole or not at all."""
    path = checkpoint.with_name(f"{checkpoint.name}-{name}")
    if path.exists():
        return path
    harness.say(f"converting to {path.name}")
    partial = checkpoint.with_name(f"partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    make(partial)
    if not partial.exists():
        raise Refused(f"its converter wrote no {path.name}")
    partial.rename(path)
    return path
