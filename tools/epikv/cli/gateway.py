"""`epikv gateway`"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.connection import DEFAULT_SERVER
from epikv.gateway.settings import Settings
from epikv.installing import pip_install

if TYPE_CHECKING:
    from epikv.gateway.server import Server

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


def _address(context: click.Context, option: click.Parameter, listen: str) -> str:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise click.BadParameter(f"'{listen}' is not HOST:PORT")
    return listen


@click.command("gateway")
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    callback=_address,
    help="Where clients ask. 0.0.0.0:8000: from other machines, too.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    default=(DEFAULT_SERVER,),
    metavar="HOST:PORT",
    envvar="EPIKV_SERVER",
    help=f"A daemon; once for each. [default: $EPIKV_SERVER, else {DEFAULT_SERVER}]",
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Processes that answer.",
)
@click.option("--tls-certificate", type=_file, help="In PEM. With it, clients speak TLS.")
@click.option("--tls-key", type=_file, help="Of the certificate.")
@click.option(
    "--max-body-bytes",
    default=4 << 20,
    show_default=True,
    type=click.IntRange(1),
    help="Of one request. The daemon takes no larger messages.",
)
@click.option(
    "--body-seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Within which a request's body has to come.",
)
@click.option(
    "--max-requests",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="At once, of each worker; then 429.",
)
@click.option(
    "--drain-seconds",
    default=60,
    show_default=True,
    type=click.IntRange(0),
    help="That streams may go on for once the gateway is told to stop.",
)
@click.option(
    "--stall-seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="That a client may take nothing of what is sent; then it is gone.",
)
@click.option(
    "--cors-origin",
    "origins",
    multiple=True,
    help="Of pages whose scripts may ask: https://chat.example, or *.",
)
def command(**options: Any) -> None:
    """Speak OpenAI's HTTP API in front of daemons.

    Set OPENAI_BASE_URL=http://127.0.0.1:8000/v1 for clients. A client's token, trace and deadline go on
    to the daemon as they are; the gateway has no token of its own. TLS to daemons is as with other
    commands ($EPIKV_TLS_CA).
    """
    _server(Settings(**options)).run()


def at(listen: str) -> "Server":
    """A gateway that listens there and has the defaults, to be run. Raises what click shows."""
    return _server(Settings(**command.make_context("epikv gateway", ["--listen", listen]).params))


def _server(settings: Settings) -> "Server":
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key are given together")
    try:
        from epikv.gateway.server import Server
    except ImportError as error:
        raise click.ClickException(f"{error}; install it: {pip_install('gateway')}") from error
    try:
        return Server(settings)
    except OSError as error:
        reason = error.strerror or error
        raise click.ClickException(f"cannot listen at {settings.listen}: {reason}") from error
