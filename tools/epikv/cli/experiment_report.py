"""`epikv experiment report`: what an experiment has found so far."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import grpc
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epikv.cli import options, show
from epikv.client import Client
from epikv.errors import RpcError
from epikv.experiment import figures, page, reading
from epikv.messages import as_json as message_as_json
from epikv.v1.experiment_pb2 import (
    Analysis,
    Effect,
    ExperimentReport,
    GuardrailReport,
    MetricReport,
)

_WIDTH = 100  # columns, where the terminal has so many
_JOINT = "\ue000"  # as wide as a space
_out = Console(highlight=False, markup=False)
_STYLES = {
    "good": "bold green",
    "bad": "bold red",
    "open": "yellow",
    "neutral": "bold",
    "early": "cyan",
}
_MARKS = {"good": "+", "bad": "!", "open": "-", "neutral": "-", "early": "-"}


@click.command("report")
@click.argument("name")
@click.option(
    "--html",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write it to this file, as one page with plots that needs no network.",
)
@click.option(
    "--watch",
    "seconds",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Ask again after so many seconds, until nothing can change any more. Looking often costs nothing.",
)
@click.option(
    "--points",
    type=click.IntRange(1, 200),
    default=50,
    show_default=True,
    help="Points of each series over time, in --html and --json.",
)
@options.server
@options.as_json
def command(
    name: str, file: Path | None, seconds: float | None, points: int, server: str, as_json: bool
) -> None:
    """Tell what experiment NAME has found so far.

    All figures hold at every look: look as often as you like, and stop when you have seen enough.
    """
    with Client(server) as client:
        try:
            for report in _reports(client, name, points, seconds):
                if file is not None:
                    _write(page.html(report), file)
                if as_json:
                    click.echo(json.dumps(message_as_json(report)))
                    continue
                if seconds is not None and show.out.is_terminal:
                    show.out.clear()
                tell(report)
        except KeyboardInterrupt:
            if seconds is None:
                raise


def _reports(
    client: Client, name: str, points: int, seconds: float | None
) -> Iterator[ExperimentReport]:
    """One; where there are `seconds`, one after another until it is final."""
    has_answered = False
    while True:
        try:
            report = client.experiment_report(name, points=points)
        except RpcError as error:
            is_away = error.code is grpc.StatusCode.UNAVAILABLE
            if seconds is None or not is_away or not has_answered:
                raise
            show.err.print(f"{error}; asking again")
        else:
            has_answered = True
            yield report
            if seconds is None or reading.is_final(report):
                return
        time.sleep(seconds)


def _write(text: str, file: Path) -> None:
    """At once, so that nobody reads half a page."""
    partial = file.with_name(f"{file.name}.part")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(file)
    except OSError as error:
        raise click.ClickException(str(error)) from error


def tell(report: ExperimentReport) -> None:
    """For people, in 100 columns at most."""
    _out.width = min(_WIDTH, show.out.width) if show.out.is_terminal else _WIDTH
    groups = reading.groups(report)
    _head(report)
    _arms(report)
    if report.blocked:
        _blocked(report)
    for metric in groups.primary:
        _metric(report, metric, f"{metric.metric.name}, the primary metric")
        for effect in () if metric.confounded else metric.all.effects:
            of = f"{effect.arm}, everyone, " if len(metric.all.effects) > 1 else "Everyone, "
            _say(f"{of}{reading.p_value(effect)}.", indent=2)
        _subgroups(report, metric)
    for metric in (*groups.declared, *groups.shadow):
        _metric(report, metric, metric.metric.name)
    if report.HasField("pairs"):
        _pairs(report)
    if groups.measured:
        _title("Measured by the server, everyone")
        _compact(report, groups.measured)
    if groups.confounded:
        _title("Measured by the server and confounded, everyone")
        _say(reading.CONFOUNDED, indent=2, style="yellow")
        _compact(report, groups.confounded)
    _guardrails(report)
    _attrition(report)
    if report.notes:
        _title("Notes")
        for note in report.notes:
            _say(f"- {reading.plain(note)}", indent=2)
    _title("How to read this")
    for line in _legend(report):
        _say(line, indent=2)


def _head(report: ExperimentReport) -> None:
    experiment = report.experiment
    _say(f"{experiment.name}: {reading.state(report)}", style="bold")
    if reason := reading.stop_reason(experiment):
        _say(f"stopped because: {reason}")
    if experiment.hypothesis:
        _say(reading.plain(experiment.hypothesis), style="italic")
    _say(f"as of {reading.moment(report.as_of)}", style="dim")
    _out.print()
    for sentence in reading.summary(report):
        _say(f"{_MARKS[sentence.tone]} {sentence.text}", style=_STYLES[sentence.tone])


def _arms(report: ExperimentReport) -> None:
    _title("Arms")
    units = reading.units(report)
    table = _table(
        "arm", "weight", units, "of all", "requests", f"exposed {units}", "exposed requests"
    )
    for arm in report.arms:
        share = figures.percent(arm.exposed_units / arm.units, 0) if arm.units else ""
        table.add_row(
            _arm_name(arm.arm, arm.control),
            figures.percent(arm.weight_permille / 1000),
            figures.count(arm.units),
            reading.units_share(arm, report.arms),
            figures.count(arm.requests),
            f"{figures.count(arm.exposed_units)} ({share})" if share else "0",
            figures.count(arm.exposed_requests),
        )
    _out.print(table)
    if reading.is_switchback(report):
        _say(reading.switchback(report), indent=2)
    for what, check in (
        (f"all {units}", report.sample_ratio),
        (f"exposed {units}", report.exposed_sample_ratio),
    ):
        style = _STYLES["bad"] if check.alarm else ""
        _say(f"Sample ratio, {what}: {reading.sample_ratio(check)}", indent=2, style=style)
    if explained := report.experiment.sample_ratio_explanation:
        _say(f"explained: {reading.plain(explained)}", indent=4)
    if running := sum(arm.running_requests for arm in report.arms):
        _say(f"No end yet: {figures.count(running)} requests", indent=2)
    if lost := sum(arm.lost_requests for arm in report.arms):
        _say(f"Lost with their server, so failed: {figures.count(lost)} requests", indent=2)
    told = [f"{figures.count(n)} {what}" for _, what, n in reading.left_out(report) if n]
    if told:
        _say(f"Requests left out of every analysis: {', '.join(told)}", indent=2)


def _blocked(report: ExperimentReport) -> None:
    _title("Why comparisons are withheld, and what to do")
    _say(f"{reading.plain(report.blocked)}.", indent=2, style=_STYLES["bad"])
    for number, step in enumerate(reading.unblocking(report.experiment), 1):
        _say(f"{number}. {step}", indent=2)
    if report.guardrails:
        _say(reading.GUARDED, indent=2)


def _metric(report: ExperimentReport, metric: MetricReport, title: str) -> None:
    _title(f"{title} ({reading.kind(metric.metric)})")
    if metric.confounded:
        _say(reading.CONFOUNDED, indent=2, style="yellow")
    how = figures.scale(metric)
    table = _table("", reading.units(report), "mean", "arm - control", "relative lift", "verdict")
    for field, name in reading.POPULATIONS.items():
        analysis: Analysis = getattr(metric, field)
        table.add_row(Text(name, style="bold"))
        if not any(value.observations for value in analysis.arms):
            table.add_row("  no data yet")
        for row in reading.rows(report, analysis):
            if not row.value.observations:
                continue
            effect = row.effect if row.effect and row.effect.HasField("difference") else None
            table.add_row(
                Text(f"  {_arm_name(row.arm, row.is_control)}"),
                figures.count(row.value.units),
                _with_interval(how.value(row.value.mean), how.interval(row.value.interval)),
                _difference(effect, how),
                f"{figures.lift(effect)}\n{figures.lift_interval(effect)}" if effect else "",
                _verdict(reading.row_verdict(report, metric, row)),
            )
    _out.print(table)
    for field, name in reading.POPULATIONS.items():
        analysis = getattr(metric, field)
        for effect in analysis.effects:
            if told := reading.adjustment(metric, analysis, effect):
                _say(f"{effect.arm}, {name}, {told}.", indent=2)


def _subgroups(report: ExperimentReport, metric: MetricReport) -> None:
    how = figures.scale(metric)
    for analysis in report.subgroups:
        level = f"{figures.level(analysis.alpha)} intervals of all subgroups together"
        _title(f"{metric.metric.name}, everyone, by {reading.plain(reading.by(analysis))}; {level}")
        table = _table("", "units", "mean", "arm - control", "verdict")
        for subgroup in analysis.subgroups:
            uneven = subgroup.sample_ratio.alarm
            ratio = f" (units by arm: {reading.sample_ratio(subgroup.sample_ratio)})"
            table.add_row(
                Text(f"{reading.plain(subgroup.name)}{ratio if uneven else ''}", style="bold")
            )
            for row in reading.rows(report, subgroup.analysis):
                if not row.value.observations:
                    continue
                effect = row.effect if row.effect and row.effect.HasField("difference") else None
                table.add_row(
                    Text(f"  {_arm_name(row.arm, row.is_control)}"),
                    figures.count(row.value.units),
                    _with_interval(how.value(row.value.mean), how.interval(row.value.interval)),
                    _difference(effect, how),
                    _verdict(reading.subgroup_verdict(report, metric, subgroup, row)),
                )
        _out.print(table)
        for found in analysis.heterogeneity:
            told = reading.heterogeneity_verdict(found)
            told = reading.NO_CAUSE if metric.confounded else told
            said = f"{reading.heterogeneity(report, found)}: {told.word}"
            _say(said, indent=2, style=_STYLES[told.tone])
    if report.subgroups:
        _say(reading.SUBGROUPS, indent=2)


def _pairs(report: ExperimentReport) -> None:
    pairs = report.pairs
    _title(f"The same prompts; {figures.level(pairs.alpha)} intervals of both metrics together")
    table = _table("metric", reading.control_of(report), "arm", "arm - control", "verdict")
    for metric in pairs.metrics:
        how = reading.paired_scale(metric)
        effect = metric.effect if metric.effect.HasField("difference") else None
        table.add_row(
            metric.metric.name,
            how.value(metric.control_mean) if metric.HasField("control_mean") else "no data yet",
            how.value(metric.arm_mean) if metric.HasField("arm_mean") else "",
            _difference(effect, how),
            _verdict(reading.paired_verdict(metric)),
        )
    _out.print(table)
    for metric in pairs.metrics:
        if metric.HasField("difference_sd"):
            sd = reading.paired_scale(metric).value(metric.difference_sd)
            _say(
                f"{metric.metric.name}: a unit's difference has a standard deviation of {sd}.",
                indent=2,
            )
    told = [f"{figures.count(n)} {what}" for _, what, n in reading.pair_fates(report) if n]
    _say(f"Pairs: {', '.join(told) or 'none yet'}", indent=2)
    style = _STYLES["bad"] if pairs.losses.alarm else ""
    _say(f"Losses: {reading.losses(pairs)}", indent=2, style=style)
    _say(reading.PAIRS, indent=2)


def _difference(effect: Effect | None, how: figures.Scale) -> str:
    if effect is None:
        return ""
    return _with_interval(
        how.difference(effect.difference), how.difference_interval(effect.interval)
    )


def _with_interval(figure: str, interval: str) -> str:
    return f"{figure}\n{interval}"


def _compact(report: ExperimentReport, metrics: Sequence[MetricReport]) -> None:
    """A line for each arm but the control, of everyone."""
    several = len(report.arms) > 2
    arm = next((a.arm for a in report.arms if not a.control), "arm")
    means = ("arm", "its mean", "control's") if several else (arm, reading.control_of(report))
    table = _table("metric", *means, "arm - control", "verdict")
    for metric in metrics:
        how = figures.scale(metric)
        rows = reading.rows(report, metric.all)
        control = next((row for row in rows if row.is_control), None)
        for place, row in enumerate(row for row in rows if not row.is_control):
            effect = row.effect if row.effect and row.effect.HasField("difference") else None
            table.add_row(
                metric.metric.name if place == 0 else "",
                *([row.arm] if several else []),
                _mean(row, how),
                _mean(control, how),
                _difference(effect, how),
                _verdict(reading.row_verdict(report, metric, row)),
            )
    _out.print(table)


def _mean(row: reading.Row | None, how: figures.Scale) -> str:
    return how.value(row.value.mean) if row and row.value.HasField("mean") else "-"


def _guardrails(report: ExperimentReport) -> None:
    if not report.guardrails:
        return
    _title("Guardrails, everyone")
    table = _table("metric", "arm", "not worse by more than", "arm - control", "verdict")
    for guardrail in report.guardrails:
        metric = reading.find(report, guardrail.guardrail.metric)
        how, told = figures.scale(metric), "no data yet"
        if guardrail.HasField("difference"):
            interval = how.difference_interval(guardrail.interval)
            told = f"{how.difference(guardrail.difference)}\n{interval}"
        table.add_row(
            guardrail.guardrail.metric,
            guardrail.arm,
            reading.margin(metric, guardrail.guardrail.margin),
            told,
            _guardrail_verdict(guardrail, metric),
        )
    _out.print(table)


def _guardrail_verdict(guardrail: GuardrailReport, metric: MetricReport) -> Text:
    told = _verdict(reading.verdict(guardrail))
    if metric.confounded:
        told.append(" (confounded)", "yellow")
    return told


def _attrition(report: ExperimentReport) -> None:
    found = [each for each in reading.attrition(report) if each.is_uneven or not each.is_measured]
    if not found:
        return
    _title("Attrition: of whose requests a metric is known")
    table = _table("metric", *(arm.arm for arm in report.arms), "")
    for each in found:
        shares = [each.shares.get(arm.arm) for arm in report.arms]
        table.add_row(
            each.metric,
            *("-" if share is None else figures.percent(share) for share in shares),
            Text("uneven", _STYLES["bad"]) if each.is_uneven else "even, but for chance",
        )
    _out.print(table)
    if any(each.is_uneven for each in found):
        _say(reading.ATTRITION, indent=2)


def _legend(report: ExperimentReport) -> Iterator[str]:
    alphas = sorted({metric.alpha for metric in report.metrics if metric.alpha})
    levels = " and ".join(f"{figures.level(alpha)} intervals" for alpha in reversed(alphas))
    yield (
        f"Under each figure stands its interval: {levels or 'intervals'} that hold at every look"
        " together, however often you look."
    )
    if len(alphas) > 1:
        yield (
            "The wider ones are of the primary metric, but for its guardrails, so that all arms"
            f" together are wrong no more often than {figures.percent(report.experiment.alpha)} of"
            " the time."
        )
    yield (
        "points: percentage points, what is added to a percentage. relative lift: the difference"
        " as a share of the control's mean."
    )
    yield (
        "Each comparison but those of the primary metric is wrong that often by itself: of twenty,"
        " one may be."
    )
    if any(effect.verdict == Effect.VERDICT_DIFFERS for effect in _effects(report)):
        yield f"differs: {reading.MEANINGS['differs']}"
    yield reading.units(report, reading.EVERYONE)
    yield reading.EXPOSED
    yield reading.units(report, f"Sample ratio, {reading.SAMPLE_RATIO}")


def _effects(report: ExperimentReport) -> Iterator[Effect]:
    for metric in report.metrics:
        yield from (*metric.all.effects, *metric.exposed.effects)


def _verdict(found: reading.Verdict | None) -> Text:
    return Text(found.word, _STYLES[found.tone]) if found else Text()


def _arm_name(arm: str, is_control: bool) -> str:
    return f"{arm} (control)" if is_control else arm


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        is_text = name in ("verdict", "arm", "")
        table.add_column(name, overflow="fold", justify="left" if is_text else "right")
    return table


def _title(text: str) -> None:
    _out.print()
    _say(text, style="bold underline")


def _say(text: str, *, indent: int = 0, style: str = "") -> None:
    whole = text.replace(" %", f"{_JOINT}%")  # no line begins with it
    for line in Text(whole, style).wrap(_out, _out.width - indent):
        line.rstrip()
        told = Text(line.plain.replace(_JOINT, " "), style)
        _out.print(Text(" " * indent).append(told))
