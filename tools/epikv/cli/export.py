"""`epikv export`"""

import sys
import time
from pathlib import Path

import click

from epikv.installing import pip_install


class _Bar:
    """Writes progress to stderr: one line that changes on a terminal, else a line a stage."""

    def __init__(self) -> None:
        self._stage = ""
        self._begun = self._written = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begins = stage != self._stage
        if begins:
            self._stage, self._begun = stage, now
        if not sys.stderr.isatty():
            if begins:
                click.echo(stage, err=True)
        elif begins or now - self._written > 0.2:
            self._written = now
            click.echo(f"\r\033[K{stage}{self._left(done, total, now)}", err=True, nl=False)

    def _left(self, done: int, total: int, now: float) -> str:
        if not total or not done:
            return ""
        left = (now - self._begun) * (total - done) / done
        return f": {100 * done // total} %, {left:.0f} s left"

    def end(self) -> None:
        if self._stage and sys.stderr.isatty():
            click.echo("\r\033[K", err=True, nl=False)


@click.command("export")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Type of the weights. Default: bf16 if they are stored so, else fp32.",
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "int4"]),
    help="Store the linears' weights as integers, in groups with a scale each. Default: in --dtype.",
)
@click.option(
    "--compile/--no-compile",
    default=False,
    help="Compile it with AOTInductor, for processors of this kind, instead of TorchScript. The "
    "daemon serves it with --trust_compiled_models.",
)
@click.option("--name", help="What the daemon calls the model. Default: the directory's name.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Calibration of epikv_flat. Default: calibration.json in DIRECTORY, if it is there.",
)
@click.option(
    "--check/--no-check", default=True, help="Compare with transformers before MODEL appears."
)
def command(
    directory: Path,
    model: Path,
    dtype: str | None,
    quantize: str | None,
    compile: bool,
    name: str | None,
    calibration: Path | None,
    check: bool,
) -> None:
    """Write the model in DIRECTORY, in the Hugging Face layout, as one file, MODEL, of TorchScript.

    Before the file appears, its logits and greedy tokens are compared with transformers. The chat
    format that is derived from the model's template is compared, too, and kept only if it gives the
    same. stderr shows what is being done, and how long it will take.
    """
    from_directory(
        directory,
        model,
        dtype=dtype,
        quantize=quantize,
        compile=compile,
        name=name,
        calibration=calibration,
        check=check,
    )


def from_directory(
    directory: Path,
    model: Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    compile: bool = False,
    name: str | None = None,
    calibration: Path | None = None,
    check: bool = True,
    err: bool = False,
) -> None:
    """Exports as the command of this name does. `err`: what it says in the end goes to stderr, too."""
    try:
        from epikv.export import archive, chat
        from epikv.export.exporter import DTYPES, ExportError, export
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what export needs: {pip_install('export')}"
        ) from error
    bar = _Bar()
    try:
        report = export(
            directory,
            model,
            dtype=dtype and DTYPES[dtype],
            quantization=quantize,
            compile=compile,
            name=name,
            calibration=calibration,
            check=check,
            progress=bar,
        )
    except (ExportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        bar.end()
    told = [
        f"{model}: {model.stat().st_size / 1e6:.1f} MB",
        str(report or "not compared with transformers"),
        f"chat: {chat.told(archive.read_chat(model))}",
    ]
    for line in told:
        click.echo(line, err=err)
