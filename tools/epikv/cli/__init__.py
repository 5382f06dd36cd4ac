"""The `epikv` command. Nothing heavy is loaded here: commands that need torch import it inside."""

from typing import Any

import click

from epikv import processes
from epikv.cli import (
    admin,
    advise,
    bench,
    calibrate,
    cancel,
    chat,
    completion,
    demo,
    eval,
    experiment,
    export,
    gateway,
    generate,
    listing,
    packet,
    plan,
    score,
    serve,
    token,
    traces,
)
from epikv.errors import RpcError


class _Main(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            with processes.ending_in_order():
                return super().invoke(ctx)
        except RpcError as error:
            click.echo(f"epikv: {error}", err=True)
            if error.advice:
                click.echo(error.advice, err=True)
            ctx.exit(1)
        except ValueError as error:  # what no request can carry, or a file of $EPIKV_TLS_*
            raise click.ClickException(str(error)) from error


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="epikv")
def main() -> None:
    """Talk to epikvd: completions whose KV cache is held to a budget by a policy you choose.

    If the server asks for a token, it gets $EPIKV_TOKEN. For TLS, $EPIKV_TLS_CA names the file of
    certificates to trust. $EPIKV_TLS_CERTIFICATE and $EPIKV_TLS_KEY name what to show to a server
    that asks for a certificate.
    """


for command in (
    admin.group,
    advise.command,
    bench.group,
    calibrate.group,
    cancel.command,
    chat.command,
    completion.command,
    demo.command,
    eval.command,
    experiment.group,
    export.command,
    gateway.command,
    generate.command,
    listing.models,
    listing.policies,
    packet.group,
    plan.group,
    score.command,
    serve.command,
    token.command,
    traces.command,
):
    main.add_command(command)
