"""`epikv export`"""

from pathlib import Path

import click


@click.command("export")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Default: as stored.")
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
        from epikv.export.exporter import DTYPES, ExportError, export
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what export needs: pip install 'epikv[export]'"
        ) from error
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
        raise click.ClickException(str(error)) from error
    click.echo(f"{model}: {model.stat().st_size / 1e6:.1f} MB")
    click.echo(report or "not compared with transformers")
