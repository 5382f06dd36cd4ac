"""`epikv experiment`: A/B tests of policies and budgets on live requests."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table

from epikv.cli import (
    experiment_plan,
    experiment_report,
    experiment_simulate,
    experiment_tables,
    options,
    outcome,
    show,
)
from epikv.client import Client
from epikv.experiment import definition
from epikv.experiment.assignment import arm_of, window_at
from epikv.outcome import parse_time
from epikv.v1.experiment_pb2 import Experiment

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_new_file = click.Path(dir_okay=False, path_type=Path)
_validate_only = click.option(
    "--validate-only", is_flag=True, help="Say what is wrong, and change nothing."
)


@click.group("experiment")
def group() -> None:
    """Compare policies and budgets on live requests.

    A definition says which requests take part, what each arm does to them, and what decides; it is
    a .textproto or .json file. `init` writes one to start from.
    """


group.add_command(outcome.one)
group.add_command(outcome.several)
group.add_command(experiment_plan.command)
group.add_command(experiment_report.command)
group.add_command(experiment_simulate.command)


@group.command("list")
@options.server
@options.as_json
def listed(server: str, as_json: bool) -> None:
    """List the experiments."""
    with Client(server) as client:
        found = client.experiments()
    if as_json:
        for each in found:
            _json_line(each)
    else:
        experiment_tables.all_of(found)


@group.command("show")
@click.argument("name")
@click.option(
    "-o",
    "--out",
    type=_new_file,
    help="Write the definition to this file, to change it and `update`.",
)
@options.server
@options.as_json
def shown(name: str, out: Path | None, server: str, as_json: bool) -> None:
    """Describe experiment NAME."""
    with Client(server) as client:
        found = client.experiment(name)
    if out is not None:
        definition.write(found, out)
    _tell(found, as_json, lambda: experiment_tables.one(found))


@group.command("create")
@click.argument("file", type=_file)
@_validate_only
@options.server
@options.as_json
def create(file: Path, validate_only: bool, server: str, as_json: bool) -> None:
    """Make the experiment of FILE as a draft: no request takes part before `start`."""
    with Client(server) as client:
        made = client.create_experiment(definition.read(file), validate_only=validate_only)
    said = "sound" if validate_only else "a draft"
    _tell(made, as_json, lambda: show.out.print(f"{made.name}: {said}"))


@group.command("update")
@click.argument("file", type=_file)
@click.option("--allow-rebucket", is_flag=True, help="Units may move to other arms while it runs.")
@_validate_only
@options.server
@options.as_json
def update(
    file: Path, allow_rebucket: bool, validate_only: bool, server: str, as_json: bool
) -> None:
    """Change the experiment to what FILE says.

    If FILE has an etag, as `show --out` writes it, nothing is changed where somebody else has changed
    the experiment since.
    """
    wanted = definition.read(file)
    with Client(server) as client:
        wanted.etag = wanted.etag or client.experiment(wanted.name).etag
        made = client.update_experiment(
            wanted, allow_rebucket=allow_rebucket, validate_only=validate_only
        )
    said = "sound" if validate_only else f"updated; buckets of version {made.bucket_version}"
    _tell(made, as_json, lambda: show.out.print(f"{made.name}: {said}"))


@group.command("start")
@click.argument("name")
@options.server
@options.as_json
def start(name: str, server: str, as_json: bool) -> None:
    """Let requests take part in NAME from now on."""
    with Client(server) as client:
        made = client.start_experiment(name)
    _tell(made, as_json, lambda: show.out.print(f"{name}: {experiment_tables.traffic(made)}"))


@group.command("stop")
@click.argument("name")
@click.option("--reason", default="", help="Text for people.")
@options.server
@options.as_json
def stop(name: str, reason: str, server: str, as_json: bool) -> None:
    """End NAME for good: no more requests take part; outcomes are still taken for a while."""
    with Client(server) as client:
        made = client.stop_experiment(name, reason=reason)
    _tell(made, as_json, lambda: show.out.print(f"{name}: stopped"))


@group.command("init")
@click.argument("file", type=_new_file)
@click.option("--server", expose_value=False, hidden=True)  # as the others; nobody is asked
def init(file: Path) -> None:
    """Write a definition to start from to FILE, a new file whose name ends in .textproto.

    The experiment gets the name of the file.
    """
    if file.suffix != ".textproto":
        raise click.UsageError(f"FILE must end in .textproto, is '{file}'")
    text = definition.template(file.stem)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    _hint(f"next: change {file}; then epikv experiment create {file} --validate-only")


@group.command("assign")
@click.argument("experiment", metavar="NAME_OR_FILE")
@click.argument("units", nargs=-1, metavar="[UNIT|TIME]...")
@click.option(
    "--units", "file", type=options.text_file, help="File with one unit a line; - is stdin."
)
@click.option(
    "--version",
    type=click.IntRange(min=1),
    help="Version of its buckets; default: the present one.",
)
@options.server
@options.as_json
def assign(
    experiment: str,
    units: tuple[str, ...],
    file: Path | None,
    version: int | None,
    server: str,
    as_json: bool,
) -> None:
    """Show which arm each UNIT gets; "none" if it does not take part.

    For a switchback experiment, show which arm the window of each TIME gets (ISO 8601 with a zone).
    Without a TIME, show the windows from now on.

    Whether a request is eligible or opts out is not considered. With a file, no server is asked.
    """
    named = [*units, *(_lines(file) if file else ())]
    dealt = _definition(experiment, server)
    dealt.bucket_version = version or dealt.bucket_version or 1
    if dealt.HasField("switchback"):
        _assign_windows(dealt, _times(named) if named else _from_now_on(dealt), as_json)
        return
    if not named:
        raise click.UsageError("no units: give them as arguments or with --units")
    if not dealt.HasField("start_time") and dealt.traffic_permille < 1000:
        _hint(
            f"{dealt.name}: not started, as far as {experiment} says, and so without a slice of its"
            f" layer yet; dealt as if that began at bucket {dealt.first_bucket}"
        )
    arms = [(unit, arm_of(dealt, unit)) for unit in named]
    if as_json:
        for unit, arm in arms:
            click.echo(json.dumps({"unit": unit, "arm": arm}))
        return
    table = Table("unit", "arm")
    for unit, arm in arms:
        table.add_row(unit, arm or "none")
    show.out.print(table)
    if len(arms) > 1:
        counts = Counter(arm or "none" for _, arm in arms)
        known = [*(arm.name for arm in dealt.arms), "none"]
        show.out.print(", ".join(f"{arm} {counts[arm]}" for arm in known))


_WINDOWS = 10


def _times(named: Sequence[str]) -> list[datetime]:
    try:
        return [parse_time(text) for text in named]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="TIME") from error


def _from_now_on(dealt: Experiment) -> list[datetime]:
    window = window_at(dealt.switchback, datetime.now(UTC))
    length = window.end - window.begin
    return [window.begin + n * length for n in range(_WINDOWS)]


def _assign_windows(dealt: Experiment, times: Sequence[datetime], as_json: bool) -> None:
    table = Table("window", "from", "analysed from", "to", "arm")
    for time in times:
        window = window_at(dealt.switchback, time)
        arm = arm_of(dealt, window.unit)
        begin, analysed_from, end = (
            each.isoformat().replace("+00:00", "Z")
            for each in (window.begin, window.analysed_from, window.end)
        )
        if as_json:
            row = {"window": window.number, "begin": begin, "analysed_from": analysed_from}
            click.echo(json.dumps({**row, "end": end, "arm": arm}))
        table.add_row(str(window.number), begin, analysed_from, end, arm)
    if not as_json:
        show.out.print(table)


def _definition(name_or_file: str, server: str) -> Experiment:
    if definition.is_file_name(name_or_file):
        try:
            return definition.read(Path(name_or_file))
        except OSError as error:
            raise click.ClickException(str(error)) from error
    with Client(server) as client:
        return client.experiment(name_or_file)


def _lines(file: Path) -> list[str]:
    with click.open_file(str(file), encoding="utf-8") as lines:
        return [unit for line in lines if (unit := line.rstrip("\r\n"))]


def _tell(made: Experiment, as_json: bool, otherwise: Callable[[], None]) -> None:
    if as_json:
        _json_line(made)
    else:
        otherwise()


def _hint(text: str) -> None:
    show.err.print(text, soft_wrap=True)


def _json_line(made: Experiment) -> None:
    """As a .json file has it."""
    click.echo(json.dumps(definition.as_json(made)))
