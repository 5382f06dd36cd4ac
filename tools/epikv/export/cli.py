"""The `epikv export` command."""

import sys
from pathlib import Path

import click

from epikv.export.errors import ExportError
from epikv.export.exporter import export

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@click.command("export")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Default: as stored.")
@click.option("--name", help="What the daemon calls the model. Default: the directory's name.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Default: calibration.json in DIRECTORY, if there.",
)
@click.option("--check/--no-check", default=True, help="Compare with transformers first.")
def command(
    directory: Path,
    model: Path,
    dtype: str | None,
    name: str | None,
    calibration: Path | None,
    check: bool,
) -> None:
    """Write the Llama-family model in DIRECTORY as one TorchScript file, MODEL.

    The file is compared with transformers before it appears: logits and greedy tokens.
    """
    try:
        report = export(
            directory,
            model,
            dtype=dtype and DTYPES[dtype],
            name=name,
            calibration=calibration,
            check=check,
        )
    except (ExportError, OSError) as error:
        sys.exit(f"epikv export: {error}")
    click.echo(f"{model}: {model.stat().st_size / 1e6:.1f} MB")
    click.echo(report or "not compared with transformers")
