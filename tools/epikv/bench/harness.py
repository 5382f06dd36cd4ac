"""The options every bench has, and the daemon it measures."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from epikv.testing import Daemon, DaemonError

Command = TypeVar("Command", bound=Callable[..., Any])


def options(command: Command) -> Command:
    """--server, --binary and --json, as parameters `server`, `binary` and `json_file`."""
    for option in (
        click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path)),
        click.option(
            "--binary",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The epikvd to start. Default: $EPIKVD, the checkout's build, or the one on PATH.",
        ),
        click.option("--server", metavar="HOST:PORT", help="Measure this one; start none."),
    ):
        command = option(command)
    return command


@contextmanager
def serving(
    server: str | None, model: Path, flags: Sequence[str] = (), binary: Path | None = None
) -> Iterator[str]:
    """The address to measure: `server`, or a daemon of our own that serves `model`."""
    if server is not None:
        yield server
        return
    try:
        with Daemon(model, *flags, binary=binary) as daemon:
            yield daemon.grpc
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
