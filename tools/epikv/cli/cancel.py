"""`epikv cancel`"""

import click

from epikv.cli import options
from epikv.client import Client


@click.command("cancel")
@click.argument("request_id")
@options.server
def command(request_id: str, server: str) -> None:
    """End the running or queued request REQUEST_ID."""
    with Client(server) as client:
        client.cancel(request_id)
