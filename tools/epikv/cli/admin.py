"""`epikv admin`: what an operator asks of a running daemon, on its admin port."""

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click
from google.protobuf import text_format
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.live import Live

from epikv.admin import DEFAULT_ADMIN_SERVER, Admin, unload_request, update_request
from epikv.cli import admin_tables, options, show
from epikv.messages import as_json
from epikv.v1 import admin_pb2, config_pb2

_WATCH_SECONDS = 2.0

Command = TypeVar("Command", bound=Callable[..., None])
Table = Callable[[Any], RenderableType]  # what people see of an answer

_server = click.option(
    "--server",
    envvar="EPIKV_ADMIN_SERVER",
    show_envvar=True,
    metavar="HOST:PORT",
    help=f"The daemon's admin_listen. Default: {DEFAULT_ADMIN_SERVER}.",
)
_watch = click.option(
    "--watch",
    "every",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    metavar="[SECONDS]",
    help=f"Show it again every {_WATCH_SECONDS:g} seconds, or so many. Ctrl-C ends it.",
)


@click.group("admin")
@_server
@click.pass_context
def group(context: click.Context, server: str | None) -> None:
    """Look at a running daemon and change it: for operators.

    Answers are tables for people. With --json an answer is one line: the message of AdminService
    with its fields' names.
    """
    context.obj = server


def _asks(command: Command) -> Command:
    """Gives a subcommand --json and the group's --server, and calls it with the address that is
    meant.

    Who has said by $EPIKV_SERVER that the daemon is elsewhere does not mean one of this machine.
    """

    @_server
    @options.as_json
    @click.pass_obj
    @wraps(command)
    def asking(of_group: str | None, /, server: str | None, **given: Any) -> None:
        address = server or of_group
        clients = os.environ.get("EPIKV_SERVER")
        if address is None and clients:
            raise click.UsageError(
                "name the daemon's admin_listen, by --server or $EPIKV_ADMIN_SERVER:"
                f" $EPIKV_SERVER is {clients}, where clients call"
            )
        command(address or DEFAULT_ADMIN_SERVER, **given)

    return cast(Command, asking)


def _changes(server: str, what: str) -> None:
    """Says on stderr, before it is done, what is asked of whom."""
    click.echo(f"epikv: {what}, at {server}", err=True)


def _tell(server: str, request: Message, as_json: bool, table: Table) -> None:
    """Asks, and prints the answer."""
    with Admin(server) as admin:
        answer = admin.ask(request)
    _print(answer, as_json, table)


def _print(answer: Message, wants_json: bool, table: Table) -> None:
    if wants_json:
        click.echo(json.dumps(as_json(answer)))
    else:
        show.out.print(table(answer))


def _look(
    server: str, request: Message, wants_json: bool, every: float | None, table: Table
) -> None:
    """Asks once, or again and again."""
    if every is None:
        _tell(server, request, wants_json, table)
        return
    console = Console(highlight=False, markup=False)
    with Admin(server) as admin:
        try:
            if wants_json or not console.is_terminal:
                while True:
                    _print(admin.ask(request), wants_json, table)
                    time.sleep(every)
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(table(admin.ask(request)), refresh=True)
                    time.sleep(every)
        except KeyboardInterrupt:
            return


@group.command("status")
@_watch
@_asks
def status(server: str, as_json: bool, every: float | None) -> None:
    """What the daemon is doing, and its models."""
    request = admin_pb2.GetServerStatusRequest()
    _look(server, request, as_json, every, admin_tables.status)


@group.command("load")
@_watch
@_asks
def load(server: str, as_json: bool, every: float | None) -> None:
    """Queue, running requests, KV and tokens per second of each model."""
    _look(server, admin_pb2.GetLoadRequest(), as_json, every, admin_tables.load)


@group.command("requests")
@click.option("--model", default="", help="Of this model; else of all.")
@_watch
@_asks
def requests(server: str, as_json: bool, model: str, every: float | None) -> None:
    """What is live, and what it waits for."""
    request = admin_pb2.ListActiveRequestsRequest(model=model)
    _look(server, request, as_json, every, admin_tables.requests)


@group.command("config")
@click.argument("settings", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--validate-only", is_flag=True, help="Say what is wrong, and change nothing.")
@_asks
def config(server: str, as_json: bool, settings: tuple[str, ...], validate_only: bool) -> None:
    """Every setting as it is now; with NAME=VALUE, change those first."""
    if not settings:
        _tell(server, admin_pb2.GetConfigRequest(), as_json, admin_tables.config)
        return
    wanted = _parsed(settings)
    request = update_request(wanted, validate_only=validate_only)
    if not validate_only:
        _changes(server, f"set {' '.join(settings)}")
    _tell(
        server,
        request,
        as_json,
        lambda answer: admin_tables.changed(answer, list(wanted), validate_only),
    )


def _parsed(settings: tuple[str, ...]) -> dict[str, Any]:
    """Raises ValueError for what no field can hold."""
    wanted = config_pb2.ServerConfig()
    fields = config_pb2.ServerConfig.DESCRIPTOR.fields_by_name
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"'{setting}' is no NAME=VALUE")
        if name in fields and fields[name].type == fields[name].TYPE_STRING:
            setattr(wanted, name, value)
            continue
        try:
            text_format.Merge(f"{name}: {value}", wanted)
        except text_format.ParseError as error:
            raise ValueError(f"'{setting}': {error}") from None
    return {name: getattr(wanted, name) for name in (s.partition("=")[0] for s in settings)}


@group.command("load-model")
@click.argument("path")
@click.option("--name", default="", help="Clients call it by; else the one in the file.")
@click.option("--artefact-dir", default="", help="What `epikv calibrate` wrote for it.")
@click.option("--draft-model", default="", help="File of a smaller model that guesses for it.")
@click.option(
    "--kv-pool-bytes", default=0, help="0: as of the model it replaces; else the daemon's."
)
@click.option("--threads", default=0, help="Of its engine; 0: the same.")
@click.option("--replace", is_flag=True, help="Take the place of the model of this name.")
@_asks
def load_model(server: str, as_json: bool, path: str, replace: bool, **given: Any) -> None:
    """Load the model file PATH, a file of the daemon's machine, and answer when it serves."""
    source = config_pb2.ModelSource(path=path, **given)
    _changes(server, f"load {path}")
    request = admin_pb2.LoadModelRequest(source=source, replace=replace)
    _tell(server, request, as_json, admin_tables.loaded)


@group.command("unload-model")
@click.argument("name")
@click.option("--grace", type=float, help="Seconds its requests may go on; else as they take.")
@_asks
def unload_model(server: str, as_json: bool, name: str, grace: float | None) -> None:
    """Take the model NAME out of service."""
    request = unload_request(name, grace)
    _changes(server, f"unload {name}")
    _tell(server, request, as_json, lambda _: f"{name} is out of service")


@group.command("drain")
@_asks
def drain(server: str, as_json: bool) -> None:
    """Refuse new requests; what runs or waits goes on."""
    _changes(server, "drain")
    _tell(server, admin_pb2.DrainRequest(), as_json, admin_tables.status)


@group.command("resume")
@_asks
def resume(server: str, as_json: bool) -> None:
    """Take requests again."""
    _changes(server, "resume")
    _tell(server, admin_pb2.ResumeRequest(), as_json, admin_tables.status)


@group.command("flush-prefix-cache")
@click.option("--model", default="", help="Of this model; else of all.")
@_asks
def flush_prefix_cache(server: str, as_json: bool, model: str) -> None:
    """Forget the cached prefixes of prompts."""
    _changes(server, "flush-prefix-cache")
    request = admin_pb2.FlushPrefixCacheRequest(model=model)
    _tell(server, request, as_json, lambda _: "the cached prefixes are forgotten")


@group.command("dump")
@_asks
def dump(server: str, as_json: bool) -> None:
    """All that can be asked and the metrics, for a bug report: always JSON."""
    with Admin(server) as admin:
        click.echo(json.dumps(admin.dump(), indent=None if as_json else 2))
