"""`epikv gateway`"""

from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.connection import DEFAULT_SERVER, Tls
from epikv.installing import pip_install

if TYPE_CHECKING:
    from epikv.gateway.server import Serving

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("gateway")
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="Where clients ask. 0.0.0.0:8000: from other machines, too.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
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
    help="Of one request.",
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
def command(
    listen: str,
    servers: tuple[str, ...],
    workers: int,
    tls_certificate: Path | None,
    tls_key: Path | None,
    max_body_bytes: int,
    body_seconds: float,
    max_requests: int,
    drain_seconds: int,
    stall_seconds: float,
    origins: tuple[str, ...],
) -> None:
    """Speak OpenAI's HTTP API in front of daemons.

    Set OPENAI_BASE_URL=http://127.0.0.1:8000/v1 for clients. A client's token, trace and deadline go on
    to the daemon as they are; the gateway has no token of its own. TLS to daemons is as with other
    commands ($EPIKV_TLS_CA).
    """
    run(
        serving(
            listen,
            servers=servers or (DEFAULT_SERVER,),
            body_bytes=max_body_bytes,
            body_seconds=body_seconds,
            at_once=max_requests,
            origins=origins,
            workers=workers,
            certificate=tls_certificate,
            key=tls_key,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds,
        )
    )


def serving(
    listen: str,
    servers: tuple[str, ...],
    *,
    workers: int = 1,
    certificate: Path | None = None,
    key: Path | None = None,
    drain_seconds: float = 60,
    stall_seconds: float = 60,
    **settings: Any,
) -> "Serving":
    """A gateway that may be run; settings are those of epikv.gateway.app.Settings. Raises what click
    shows."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise click.BadParameter(f"'{listen}' is not HOST:PORT", param_hint="--listen")
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-certificate and --tls-key are given together")
    try:
        from epikv.gateway.app import Settings
        from epikv.gateway.server import Serving
    except ImportError as error:
        raise click.ClickException(f"{error}; install it: {pip_install('gateway')}") from error
    return Serving(
        host.strip("[]"),
        int(port),
        Settings(servers, Tls.from_environment(), local=_is_loopback(host), **settings),
        workers,
        certificate,
        key,
        drain_seconds,
        stall_seconds,
    )


def run(serving: "Serving", servers: tuple[str, ...] | None = None) -> None:
    """servers: in place of those that it was told."""
    from epikv.gateway import server

    if servers is not None:
        serving = replace(serving, settings=replace(serving.settings, servers=servers))
    server.run(serving)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
