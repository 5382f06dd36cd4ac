"""`epikv experiment outcome` and `outcomes`: what requests turned out to be worth."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from epikv.cli import options, show
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import OutcomeResult
from epikv.outcome import MAX_BATCH, Outcome, Patience, parse_time

_SHOWN = 5  # lines, of what was refused for one reason


class Time(click.ParamType):
    """As ISO 8601 has it, with a zone."""

    name = "2031-05-01T12:00:00Z"

    def convert(self, value: Any, param: Any, ctx: Any) -> datetime:
        if not isinstance(value, str):
            return value
        try:
            return parse_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


# A value may begin with a minus.
@click.command("outcome", context_settings={"ignore_unknown_options": True})
@click.argument("request_id")
@click.argument("metric")
@click.argument("value", type=float)
@click.option("--key", default="", help="Tells several outcomes of one metric apart.")
@click.option("--time", "at", type=Time(), help="When it happened; default: now.")
@click.option("--tenant", default="", help="Whose request it is; default: the caller's own.")
@options.server
@options.as_json
def one(
    request_id: str,
    metric: str,
    value: float,
    key: str,
    at: datetime | None,
    tenant: str,
    server: str,
    as_json: bool,
) -> None:
    """Record that request REQUEST_ID had VALUE in METRIC. Recording it twice does no harm."""
    with Client(server) as client:
        recorded = client.record_outcome(request_id, metric, value, time=at, key=key, tenant=tenant)
    if as_json:
        show.json_line("recorded", recorded)
    elif recorded.duplicate:
        show.out.print("it had been recorded before")
    else:
        away = ", to join its request when the store is back" if recorded.spooled else ""
        show.out.print(f"recorded{away}")


@click.command("outcomes")
@click.argument("file", type=options.text_file)
@options.server
@options.as_json
@click.pass_context
def several(context: click.Context, file: Path, server: str, as_json: bool) -> None:
    """Record the outcomes of FILE (- is stdin), one JSON object a line.

    Each has request_id, metric and value, and may have time, key and tenant. If some are refused,
    the others are still recorded; the refused ones are listed at the end, and the exit status is 1.
    After an interruption, run it again: recording an outcome twice does no harm.
    """
    tally = _Tally()
    try:
        with click.open_file(str(file), "rb") as lines, Client(server) as client:
            _record(lines, client, tally)
    except RpcError:
        show.err.print("interrupted: what was recorded until then stays")
        _summarize(tally, as_json)
        raise
    _summarize(tally, as_json)
    if tally.refused:
        context.exit(1)


@dataclass(frozen=True)
class _Refused:
    line: int
    code: str
    reason: str
    message: str


@dataclass
class _Tally:
    recorded: int = 0
    duplicates: int = 0  # of those
    spooled: int = 0  # of those
    refused: list[_Refused] = field(default_factory=list)

    def add(self, line: int, result: OutcomeResult) -> None:
        error = result.error
        if error is not None:
            self.refused.append(_Refused(line, error.code.name, error.reason, error.message))
            return
        self.recorded += 1
        if result.response is not None:
            self.duplicates += result.response.duplicate
            self.spooled += result.response.spooled


def _record(lines: Iterable[bytes], client: Client, tally: _Tally) -> None:
    began = time.monotonic()
    given = _outcomes(lines, tally)
    with show.err.status("reading") as status:
        while batch := list(islice(given, MAX_BATCH)):
            # Requests of this file began before it was read: later batches need not wait again.
            unknown = max(0.0, Patience.unknown - (time.monotonic() - began))
            results = client.record_outcomes(
                [outcome for _, outcome in batch], patience=Patience(unknown=unknown)
            )
            for (line, _), result in zip(batch, results, strict=True):
                tally.add(line, result)
            status.update(f"{tally.recorded} recorded, {len(tally.refused)} refused")


def _outcomes(lines: Iterable[bytes], tally: _Tally) -> Iterator[tuple[int, Outcome]]:
    """With their lines. Those that are no outcomes are refused here."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            outcome = Outcome.from_json(line)
        except ValueError as error:
            tally.refused.append(_Refused(number, "INVALID_ARGUMENT", "LINE", str(error)))
        else:
            yield number, outcome


def _summarize(tally: _Tally, as_json: bool) -> None:
    counts = {"recorded": tally.recorded, "duplicates": tally.duplicates, "spooled": tally.spooled}
    refused = sorted(tally.refused, key=lambda each: each.line)
    if as_json:
        for each in refused:
            show.json_line("refused", each)
        click.echo(json.dumps({"event": "summary", **counts, "refused": len(refused)}))
        return
    before = f", {tally.duplicates} of them before" if tally.duplicates else ""
    away = f", {tally.spooled} to join their requests when the store is back"
    show.out.print(f"{tally.recorded} recorded{before}{away if tally.spooled else ''}")
    if not refused:
        return
    table = Table("refused", "code", "lines", "why, of the first")
    groups: dict[str, list[_Refused]] = {}
    for each in refused:
        code = f"{each.code} ({each.reason})" if each.reason else each.code
        groups.setdefault(code, []).append(each)
    for code, members in groups.items():
        lines = ", ".join(str(each.line) for each in members[:_SHOWN])
        more = ", ..." if len(members) > _SHOWN else ""
        table.add_row(str(len(members)), code, lines + more, members[0].message)
    show.out.print(table)
