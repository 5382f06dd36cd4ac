"""`epikv bench NAME`: measurements against stated targets, for people rather than the test suite.

A bench is a module of this package with a click command named `command`; this file finds it. It
imports what is heavy inside the command, measures, and ends with `targets.finish`.

Exit status: 0 if every target is met, 1 if one is short, 2 if there is no result to judge, 130 if
it was interrupted; 143 or 129 if SIGTERM or SIGHUP ended it. Its daemon never outlives it.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

from epikv.bench.targets import INTERRUPTED
from epikv.errors import RpcError

_SHARED = (
    "capacity",
    "costs",
    "generator",
    "harness",
    "plots",
    "reference",
    "report",
    "resident",
    "scrape",
    "streams",
    "targets",
    "watch",
    "workload",
)


class _Benches(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            module.name for module in iter_modules(__path__) if module.name not in _SHARED
        )

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return import_module(f"{__name__}.{name}").command

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


@click.group("bench", cls=_Benches)
def command() -> None:
    """Measure a property of the daemon against its target.

    The exit status is 1 if a target is short, and 2 if nothing could be measured. In a checkout
    the daemon is built first, unless $EPIKVD, --binary or --server names one.
    """
