"""`epikv bench NAME`: measurements against stated targets, for people rather than the test suite.

A bench is a module of this package with a click command named `command`; this file finds it. It
imports what is heavy inside the command, measures, and ends with `targets.finish`.
"""

from importlib import import_module
from pkgutil import iter_modules

import click

_SHARED = ("harness", "load", "scrape", "targets")


class _Benches(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            module.name for module in iter_modules(__path__) if module.name not in _SHARED
        )

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return import_module(f"{__name__}.{name}").command


@click.group("bench", cls=_Benches)
def command() -> None:
    """Measure a property of the daemon against its target; exit 1 if it falls short."""
