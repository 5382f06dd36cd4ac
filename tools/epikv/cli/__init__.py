"""The `epikv` command. Nothing heavy is loaded here: a command's module is loaded when it is asked for, and those that
need torch import it inside."""

from importlib import import_module
from typing import Any

import click

from epikv import processes
from epikv.errors import RpcError

# Module of this package, and name in it, of each command.
_COMMANDS = {
    "admin": ("admin", "group"),
    "advise": ("advise", "command"),
    "bench": ("bench", "group"),
    "calibrate": ("calibrate", "group"),
    "cancel": ("cancel", "command"),
    "chat": ("chat", "command"),
    "completion": ("completion", "command"),
    "demo": ("demo", "command"),
    "eval": ("eval", "command"),
    "experiment": ("experiment", "group"),
    "export": ("export", "command"),
    "gateway": ("gateway", "command"),
    "generate": ("generate", "command"),
    "models": ("listing", "models"),
    "packet": ("packet", "group"),
    "plan": ("plan", "group"),
    "policies": ("listing", "policies"),
    "score": ("score", "command"),
    "serve": ("serve", "command"),
    "token": ("token", "command"),
    "traces": ("traces", "command"),
}


class _Main(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name]
        command = getattr(import_module(f"{__name__}.{module}"), attribute)
        assert isinstance(command, click.Command), name
        return command

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
