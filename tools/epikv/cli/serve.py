"""`epikv serve`"""

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import click

from epikv.cli import export
from epikv.testing import DaemonError, find_binary


@click.command(
    "serve",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="For a directory: see epikv export.",
)
@click.option(
    "--quantize", type=click.Choice(["int8", "int4"]), help="For a directory: see epikv export."
)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[EPIKVD FLAGS]...")
def command(model: Path, dtype: str | None, quantize: str | None, flags: tuple[str, ...]) -> None:
    """Start epikvd with MODEL: a file that `epikv export` wrote, or a Hugging Face directory.

    A directory is exported first, into $XDG_CACHE_HOME/epikv (~/.cache/epikv), and again only when
    something in it has changed. What follows MODEL goes to the daemon:

        epikv serve model.pt --threads=4 --listen=127.0.0.1:50061

    The daemon says when it serves, and prints its addresses as one line of JSON. Ctrl-C ends it.
    """
    try:
        binary = find_binary()
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
    if model.is_dir():
        model = _exported(model, dtype, quantize)
    elif dtype or quantize:
        raise click.UsageError(f"--dtype and --quantize are for a directory; {model} is a file")
    command = [str(binary), f"--model={model}", *flags]
    os.execv(binary, command)  # so signals are the daemon's own


def _exported(directory: Path, dtype: str | None, quantize: str | None) -> Path:
    """The file made from a directory, which is made unless it is there."""
    directory = directory.resolve()
    made_from = hashlib.sha256(repr((version("epikv"), dtype, quantize)).encode())
    for file in sorted(directory.rglob("*")):
        facts = file.stat()
        made_from.update(
            repr((str(file.relative_to(directory)), facts.st_size, facts.st_mtime_ns)).encode()
        )
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    model = Path(home) / "epikv" / f"{directory.name}-{made_from.hexdigest()[:16]}.pt"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        export.from_directory(directory, model, dtype=dtype, quantize=quantize, err=True)
    return model
