"""`epikv bench NAME`: measurements, for people rather than the test suite.

`load` is for any daemon. The other benches are of this project alone and come with tools/lab.

Exit status: 0 if there is a result, which meets every target if there are any; 1 if a target is
short, 2 if there is no result, 130 if it was interrupted; 143 or 129 if SIGTERM or SIGHUP ended it.
Its daemon never outlives it.
"""

from typing import Any

import click

from epikv.errors import RpcError
from epikv.extensions import Extensible
from epikv.processes import INTERRUPTED


class _Benches(Extensible):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({"load", *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "load":
            from epikv.bench.load import command

            return command
        return super().get_command(ctx, name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.exit_code = 2  # type: ignore[misc]  # click reads it of the instance
            raise
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(INTERRUPTED)
        except (RpcError, OSError, ValueError) as error:
            unmeasured = click.ClickException(_told(error))
            unmeasured.exit_code = 2  # type: ignore[misc]  # as above
            raise unmeasured from error


def _told(error: Exception) -> str:
    advice = error.advice if isinstance(error, RpcError) else ""
    return f"{error}\n{advice}".rstrip()


@click.group("bench", cls=_Benches, extensions="epikv.bench")
def group() -> None:
    """Measure a daemon.

    `load` sends a load of your own. A checkout that deploy/setup.sh has set up has more: benches of
    epikvd against its targets and beside other servers.

    The exit status is 1 if a target is short, and 2 if nothing could be measured. In a checkout
    the daemon is built first, unless $EPIKVD, --binary or --server names one.
    """
