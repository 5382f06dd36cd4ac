"""`epikv serve`"""

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import click

from epikv import processes
from epikv.cli import export, gateway
from epikv.testing import DaemonError, find_binary

_ONLY_TELL = {"--help", "--version", "--print_config"}  # flags with which the daemon serves nothing


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
@click.option(
    "--http",
    metavar="[HOST:]PORT",
    help="Speak OpenAI's API, too: `epikv gateway` in front of the daemon. HOST is 127.0.0.1 if it is left out.",
)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[EPIKVD FLAGS]...")
def command(
    model: Path,
    dtype: str | None,
    quantize: str | None,
    http: str | None,
    flags: tuple[str, ...],
) -> None:
    """Start epikvd with MODEL: a file that `epikv export` wrote, or a Hugging Face directory.

    A directory is exported first, into $XDG_CACHE_HOME/epikv (~/.cache/epikv), and again only when
    something in it has changed. What follows MODEL goes to the daemon:

        epikv serve model.pt --threads=4 --listen=127.0.0.1:50061

    but for --http, which may stand there, too:

        epikv serve model.pt --http 8000

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
    http, flags = _http_of(http, flags)
    command = [str(binary), f"--model={model}", *flags]
    if http is None or _ONLY_TELL.intersection(flags):
        os.execv(binary, command)  # so signals are the daemon's own
    _with_gateway(command, http if ":" in http else f"127.0.0.1:{http}")


def _http_of(http: str | None, flags: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """--http is ours wherever it stands; all other flags are the daemon's."""
    rest: list[str] = []
    given = iter(flags)
    for flag in given:
        name, equals, value = flag.partition("=")
        if name != "--http":
            rest.append(flag)
            continue
        http = value if equals else next(given, None)
        if not http:
            raise click.UsageError("--http needs [HOST:]PORT")
    return http, tuple(rest)


def _with_gateway(command: Sequence[str], listen: str) -> None:
    """Both end when one of them does: the gateway first, so that its streams can end."""
    http = gateway.at(listen)  # what is wrong with it is said before models load
    daemon = processes.start(command, end=signal.SIGTERM, stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    line = daemon.stdout.readline()
    if not line:
        raise SystemExit(daemon.wait())
    click.echo(line, nl=False)

    def follow() -> None:
        daemon.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()
    http.run(servers=[json.loads(line)["grpc"]])
    daemon.terminate()
    raise SystemExit(daemon.wait())


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
