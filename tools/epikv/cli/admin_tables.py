"""What people see of an operator's answers."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from rich.console import Group, RenderableType
from rich.table import Column, Table

from epikv.messages import ActiveRequest, Model, ServerStatus, as_json, from_proto
from epikv.v1 import admin_pb2, config_pb2, model_pb2

# What AdminService changes while the daemon runs, as admin.proto says.
CHANGEABLE = (
    "default_equal_protection",
    "default_max_output_tokens",
    "default_policy",
    "drain_seconds",
    "log_level",
    "max_queued_requests",
    "max_queued_tokens",
)

_WAITS = {
    "turn": "its turn",
    "kv": "room in the KV pool",
    "place": "one of max_running_requests",
    "reader": "its client to read",
}


def status(answer: admin_pb2.ServerStatus) -> RenderableType:
    found: ServerStatus = from_proto(answer)
    told = f"epikvd {found.version}: {found.state}"
    if found.state == "draining":
        told += ", new requests are refused"
    if found.start_time is not None:
        up = datetime.now(UTC) - found.start_time
        told += f"\nsince {found.start_time:%Y-%m-%d %H:%M:%S} UTC, {duration(up.total_seconds())}"
    if not found.models:
        return f"{told}\nno model is served"
    names = [model.name or "(not named yet)" for model in found.models]
    table = Table(_name("model", names), "state", _number("live requests"))
    for name, model in zip(names, found.models, strict=True):
        table.add_row(name, model.state, str(model.live_requests))
    return Group(told, table)


def load(answer: admin_pb2.GetLoadResponse) -> RenderableType:
    if not answer.models:
        return "no model is served"
    table = Table(
        _name("model", [each.model for each in answer.models], room=16),
        _number("running"),
        _number("waiting"),
        _number("KV pool"),
        _number("new ones wait"),
        _number("tokens/s"),
    )
    for each in map(from_proto, answer.models):
        table.add_row(
            each.model,
            str(each.running_requests),
            str(each.waiting_requests),
            f"{size(each.kv_used_bytes)} used\n{size(each.kv_reserved_bytes)} reserved\n"
            f"of {size(each.kv_capacity_bytes)}",
            "" if each.predicted_wait is None else duration(each.predicted_wait),
            f"{each.prompt_tokens_per_second:.0f} in\n{each.output_tokens_per_second:.0f} out",
        )
    prefixes = [
        f"{each.model}: {size(each.kv_prefix_bytes)} of cached prefixes, which give way to requests"
        for each in answer.models
        if each.kv_prefix_bytes
    ]
    return Group(table, *prefixes)


def requests(answer: admin_pb2.ListActiveRequestsResponse) -> RenderableType:
    found: list[ActiveRequest] = [from_proto(request) for request in answer.requests]
    if not found:
        return "no request is live"
    models = len({request.model for request in found}) > 1
    names = [_request(each, models) for each in found]
    table = Table(_name("request", names), "doing", _number("tokens out\nKV"), _number("age"))
    for name, each in zip(names, found, strict=True):
        left = "" if each.time_left is None else f"\n{duration(each.time_left)} left"
        table.add_row(
            name,
            doing(each),
            f"{each.output_tokens} of {each.max_output_tokens}\n"
            f"{size(each.kv_used_bytes)} of {size(each.kv_reserved_bytes)}",
            ("" if each.age is None else duration(each.age)) + left,
        )
    return table


def _request(request: ActiveRequest, models: bool) -> str:
    """What it is called by, and beneath it what its cache is under."""
    name = request.request_id
    if request.completion:
        name += f" ({request.completion})"
    budget = "" if request.policy == "full" else f", {request.budget_tokens} tokens"
    model = f"{request.model}: " if models else ""
    return f"{name}\n{model}{request.policy}{budget}"


def doing(request: ActiveRequest) -> str:
    """The state, and what keeps the request from going on."""
    if request.waits_for == "unspecified":
        return request.state
    return f"{request.state}, waits for {_WAITS.get(request.waits_for, request.waits_for)}"


def config(answer: config_pb2.ServerConfig) -> RenderableType:
    settings = as_json(answer)
    table = Table(_name("setting", settings), "value")
    for name, value in settings.items():
        table.add_row(f"{name} *" if name in CHANGEABLE else name, _setting(value))
    return Group(table, "* changes while it runs: epikv admin config NAME=VALUE")


def changed(
    answer: config_pb2.ServerConfig, names: list[str], validate_only: bool
) -> RenderableType:
    """What has changed, of all the settings."""
    settings = as_json(answer)
    table = Table(_name("setting", names), "value")
    for name in names:
        table.add_row(name, _setting(settings[name]))
    so_long = "that would do; nothing was changed" if validate_only else "until the daemon ends"
    return Group(table, so_long)


def loaded(answer: model_pb2.Model) -> RenderableType:
    model: Model = from_proto(answer)
    return (
        f"{model.name} serves: {model.quantization or model.dtype}, {model.layers} layers,"
        f" a KV pool of {model.kv_capacity_tokens} tokens ({size(model.kv_capacity_bytes)})"
    )


def size(count: int) -> str:
    """Bytes for people, in units of 1000 as the daemon's log has them."""
    scaled, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if scaled < 999.5 or unit == "TB":
            break
        scaled /= 1000
    return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 99.95 else f"{scaled:.1f} {unit}"


def duration(seconds: float) -> str:
    """Of two units at most: "0.4 s", "12 s", "3 min 5 s", "2 d 4 h"."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    left = timedelta(seconds=round(seconds))
    hours, rest = divmod(left.seconds, 3600)
    minutes, rest = divmod(rest, 60)
    units = ((left.days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    parts = [f"{count} {unit}" for count, unit in units if count]
    return " ".join(parts[:2])


def _setting(value: object) -> str:
    if value == "":
        return "(empty)"
    return value if isinstance(value, str) else json.dumps(value)


def _name(title: str, names: Iterable[str], room: int = 44) -> Column:
    """A name is there to be copied: it is not cut, and not broken unless it is longer than a
    terminal of 80 columns has `room` for."""
    longest = max(len(line) for name in names for line in name.splitlines())
    return Column(title, no_wrap=longest <= room, overflow="fold")


def _number(title: str) -> Column:
    return Column(title, justify="right", no_wrap=True)
