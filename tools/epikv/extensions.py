"""Commands that come with another package, where that is installed."""

from importlib.metadata import EntryPoints, entry_points
from typing import Any

import click


class Extensible(click.Group):
    """Its own commands, and those that are entry points of the group `extensions`: for this project's
    own measuring and training they are, in tools/lab/pyproject.toml."""

    def __init__(self, *args: Any, extensions: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self._extensions = extensions

    def list_commands(self, ctx: click.Context) -> list[str]:
        found: EntryPoints = entry_points(group=self._extensions)
        return sorted({*super().list_commands(ctx), *found.names})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        own = super().get_command(ctx, name)
        if own is not None:
            return own
        for found in entry_points(group=self._extensions, name=name):
            command = found.load()
            assert isinstance(command, click.Command), found
            return command
        return None
