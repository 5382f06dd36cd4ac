"""`epikv admin`: what an operator asks of a running daemon, on its admin port. Answers are JSON."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import click
import grpc
from google.protobuf import json_format, text_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from epikv.connection import Tls, connect, token_from_environment
from epikv.errors import RpcError
from epikv.v1 import admin_pb2, admin_pb2_grpc, config_pb2

DEFAULT_SERVER = "127.0.0.1:50052"

Command = TypeVar("Command", bound=Callable[..., None])


@contextmanager
def _admin(server: str) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    token = token_from_environment()
    with connect(server, tls=Tls.from_environment(), token=token) as channel:
        try:
            yield admin_pb2_grpc.AdminServiceStub(channel)
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None


def _print(message: Message) -> None:
    click.echo(json_format.MessageToJson(message, preserving_proto_field_name=True))


_server = click.option(
    "--server",
    envvar="EPIKV_ADMIN_SERVER",
    show_envvar=True,
    metavar="HOST:PORT",
    help=f"The daemon's admin_listen. Default: {DEFAULT_SERVER}.",
)


@click.group("admin")
@_server
@click.pass_context
def group(context: click.Context, server: str | None) -> None:
    """Look at a running daemon and change it: for operators."""
    context.obj = server


def _asks(command: Command) -> Command:
    """Gives a subcommand the group's --server, too, and calls it with the address that is meant.

    Who has said by $EPIKV_SERVER that the daemon is elsewhere does not mean one of this machine.
    """

    @_server
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
        command(address or DEFAULT_SERVER, **given)

    return cast(Command, asking)


def _changes(server: str, what: str) -> None:
    """Says on stderr, before it is done, what is asked of whom."""
    click.echo(f"epikv: {what}, at {server}", err=True)


@group.command("requests")
@click.option("--model", default="", help="Of this model; else of all.")
@_asks
def requests(server: str, model: str) -> None:
    """What is live, and what it waits for."""
    with _admin(server) as admin:
        _print(admin.ListActiveRequests(admin_pb2.ListActiveRequestsRequest(model=model)))


@group.command("config")
@click.argument("settings", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--validate-only", is_flag=True, help="Say what is wrong, and change nothing.")
@_asks
def config(server: str, settings: tuple[str, ...], validate_only: bool) -> None:
    """Every setting as it is now; with NAME=VALUE, change those first."""
    if not settings:
        with _admin(server) as admin:
            _print(admin.GetConfig(admin_pb2.GetConfigRequest()))
        return
    request = admin_pb2.UpdateConfigRequest(
        config=_config_of(settings),
        update_mask=FieldMask(paths=[setting.partition("=")[0] for setting in settings]),
        validate_only=validate_only,
    )
    if not validate_only:
        _changes(server, f"set {' '.join(settings)}")
    with _admin(server) as admin:
        _print(admin.UpdateConfig(request))


def _config_of(settings: tuple[str, ...]) -> config_pb2.ServerConfig:
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
    return wanted


@group.command("load-model")
@click.argument("path")
@click.option("--name", default="", help="Clients call it by; else the one in the file.")
@click.option("--artefact-dir", default="", help="What `epikv calibrate` wrote for it.")
@click.option(
    "--kv-pool-bytes", default=0, help="0: as of the model it replaces; else the daemon's."
)
@click.option("--threads", default=0, help="Of its engine; 0: the same.")
@click.option("--replace", is_flag=True, help="Take the place of the model of this name.")
@_asks
def load_model(
    server: str,
    path: str,
    name: str,
    artefact_dir: str,
    kv_pool_bytes: int,
    threads: int,
    replace: bool,
) -> None:
    """Load the model file PATH, a file of the daemon's machine, and answer when it serves."""
    source = config_pb2.ModelSource(
        path=path,
        name=name,
        artefact_dir=artefact_dir,
        kv_pool_bytes=kv_pool_bytes,
        threads=threads,
    )
    _changes(server, f"load {path}")
    with _admin(server) as admin:
        _print(admin.LoadModel(admin_pb2.LoadModelRequest(source=source, replace=replace)))


@group.command("unload-model")
@click.argument("name")
@click.option("--grace", type=float, help="Seconds its requests may go on; else as they take.")
@_asks
def unload_model(server: str, name: str, grace: float | None) -> None:
    """Take the model NAME out of service."""
    wait = None
    if grace is not None:
        wait = Duration()
        wait.FromTimedelta(timedelta(seconds=grace))
    _changes(server, f"unload {name}")
    with _admin(server) as admin:
        _print(admin.UnloadModel(admin_pb2.UnloadModelRequest(name=name, grace=wait)))


# Those that ask without saying anything more, and whether they change anything.
_PLAIN = (
    ("status", "GetServerStatus", False, "What the daemon is doing, and its models."),
    ("load", "GetLoad", False, "Queue, running requests, KV and tokens per second of each model."),
    ("drain", "Drain", True, "Refuse new requests; what runs or waits goes on."),
    ("resume", "Resume", True, "Take requests again."),
    ("flush-prefix-cache", "FlushPrefixCache", True, "Forget the cached prefixes of prompts."),
    ("dump", "DumpState", False, "All that can be asked and the metrics, for a bug report."),
)


def _plain(name: str, method: str, changes: bool) -> Callable[[str], None]:
    def ask(server: str) -> None:
        if changes:
            _changes(server, name)
        with _admin(server) as admin:
            _print(getattr(admin, method)(getattr(admin_pb2, f"{method}Request")()))

    return ask


for _name, _method, _change, _help in _PLAIN:
    group.command(_name, help=_help)(_asks(_plain(_name, _method, _change)))
