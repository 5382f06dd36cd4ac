"""`epikv experiment plan`: how many units it takes to find something."""

import json
from datetime import timedelta

import click
from rich.table import Table

from epikv.cli import options, show
from epikv.client import Client
from epikv.experiment import figures, reading
from epikv.messages import as_json as message_as_json
from epikv.v1.experiment_pb2 import ExperimentPlan

_OPEN_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command("plan")
@click.option(
    "--metric-kind",
    type=click.Choice(["mean", "proportion"]),
    help="Default: proportion with --rate, mean with --sd.",
)
@click.option(
    "--rate", type=_OPEN_SHARE, help="For a proportion: the control's rate, 0.7 for 70 %."
)
@click.option(
    "--sd",
    type=click.FloatRange(0, min_open=True),
    help="For a mean: the standard deviation between units, in the metric's units.",
)
@click.option(
    "--effect",
    type=float,
    help="Effect to find: arm - control, in the metric's units; 0.02 of a rate is 2 points.",
)
@click.option(
    "--units",
    type=click.IntRange(min=1),
    help="Number of units that there will be, in all arms together.",
)
@click.option(
    "--power",
    type=_OPEN_SHARE,
    default=0.8,
    show_default=True,
    help="Chance to find the effect.",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Chance to find an effect that is not there, over all looks.",
)
@click.option(
    "--looks",
    type=click.IntRange(1, 200),
    default=20,
    show_default=True,
    help="Number of looks, at equal distances; the last when all units are there.",
)
@click.option(
    "--arms",
    type=click.IntRange(2, 8),
    default=2,
    show_default=True,
    help="Number of arms, the control included.",
)
@click.option(
    "--control-share",
    type=_OPEN_SHARE,
    help="Share of the units that the control gets; default: as many as each other arm.",
)
@click.option(
    "--r2",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of the variance that the covariate explains.",
)
@click.option(
    "--window",
    type=click.FloatRange(1, 86400),
    metavar="SECONDS",
    help="For a switchback experiment: length of its windows, which are its units.",
)
@click.option(
    "--pairs",
    is_flag=True,
    help="Of units whose first prompt both arms answer: --sd is that of a unit's difference, as reports"
    " say it.",
)
@options.server
@options.as_json
def command(
    metric_kind: str | None,
    rate: float | None,
    sd: float | None,
    effect: float | None,
    units: int | None,
    power: float,
    alpha: float,
    looks: int,
    arms: int,
    control_share: float | None,
    r2: float,
    window: float | None,
    pairs: bool,
    server: str,
    as_json: bool,
) -> None:
    """Show how many units it takes to find --effect, or which effect so many --units find.

    A unit is what keeps its arm: a user, a session, a request that names no unit, or a window of a
    switchback experiment (--window). Units whose requests are too short for eviction count, too. So
    plan for the effect in everyone. The --sd of windows is that of their means, not of requests.
    """
    _check(metric_kind, rate, sd, effect, units)
    if pairs and (rate is not None or window is not None or control_share or r2 or arms > 2):
        raise click.UsageError(
            "--pairs goes with --sd, without --window, --control-share, --r2 and more --arms"
        )
    permille = round(1000 * control_share) if control_share else 0
    if control_share and not 1 <= permille <= 999:
        raise click.BadParameter("must be from 0.001 to 0.999", param_hint="--control-share")
    with Client(server) as client:
        plan = client.plan_experiment(
            rate=rate,
            sd=sd,
            effect=effect,
            units=units,
            power=power,
            alpha=alpha,
            looks=looks,
            arms=arms,
            control_permille=permille,
            covariate_r2=r2,
            pairs=pairs,
        )
    if as_json:
        click.echo(json.dumps(message_as_json(plan)))
        return
    table = Table.grid(padding=(0, 2))
    control = permille / 1000 or 1 / arms
    rows = _found(plan, rate, power) if effect is None else _needed(plan, effect, rate, sd)
    for name, value in (*rows, *([] if pairs else _always(plan, power, control, arms))):
        if window is not None:
            name, value = (text.replace("units", "windows") for text in (name, value))
        table.add_row(name, value)
    if window is not None:
        takes = reading.lapse(plan.units * window)
        each = reading.span(timedelta(seconds=window))
        table.add_row("time", f"{takes}, in windows of {each}, without a break")
    show.out.print(table)
    each = " Each arm is compared with the control; alpha is shared out." if arms > 2 else ""
    show.out.print(
        f"At {looks} looks, with a chance of {figures.percent(alpha, 0 if alpha >= 0.01 else 2)} to"
        f" find over all looks what is not there.{each}"
    )


def _check(
    kind: str | None,
    rate: float | None,
    sd: float | None,
    effect: float | None,
    units: int | None,
) -> None:
    if (rate is None) == (sd is None):
        raise click.UsageError("give --rate of a proportion or --sd of a mean, one of them")
    if kind is not None and (kind == "proportion") != (rate is not None):
        wanted = "--rate" if kind == "proportion" else "--sd"
        raise click.UsageError(f"a {kind} is described by {wanted}")
    if (effect is None) == (units is None):
        raise click.UsageError("give --effect to be found or --units there will be, one of them")
    if effect == 0:
        raise click.BadParameter("must not be 0", param_hint="--effect")


def _needed(
    plan: ExperimentPlan, effect: float, rate: float | None, sd: float | None
) -> list[tuple[str, str]]:
    told = f"{_difference(effect, rate)}"
    if sd is not None:
        told += f", {effect / sd:+.3g} standard deviations"
    return [
        ("to find", told),
        ("takes", f"{figures.count(plan.units)} units"),
        ("is then found", f"with a chance of {figures.percent(plan.power)}"),
    ]


def _found(plan: ExperimentPlan, rate: float | None, power: float) -> list[tuple[str, str]]:
    rows = [("with", f"{figures.count(plan.units)} units")]
    for field, way in (("effect_up", "a rise of"), ("effect_down", "a fall of")):
        told = "nothing: there are too few units, or there is no room for it"
        if plan.HasField(field):
            told = f"{_difference(getattr(plan, field), rate)}, or more"
        rows.append((f"{way}", told))
    return [*rows, ("is found", f"with a chance of {figures.percent(power)}")]


def _difference(effect: float, rate: float | None) -> str:
    if rate is None:
        return f"{effect:+.4g}"
    points = figures.with_unit(f"{100 * effect:+.4g}", "percentage points")
    return (
        f"{points}, from {100 * rate:.4g} % to {100 * (rate + effect):.4g} %"
        f" ({100 * effect / rate:+.3g} % of the rate)"
    )


def _always(plan: ExperimentPlan, power: float, control: float, arms: int) -> list[tuple[str, str]]:
    others = (1 - control) / (arms - 1)
    split = ["control " + figures.count(round(plan.units * control))]
    split.append(f"each other arm {figures.count(round(plan.units * others))}")
    rows = [("units by arm", ", ".join(split))]
    if plan.tau:
        rows.append(("tau", f"{plan.tau:.6g}; put it into the metric, or it takes more units"))
    if plan.sample_ratio_units:
        rows.append(
            (
                "sample ratio",
                f"if 1 % of one arm's units got lost, {figures.count(plan.sample_ratio_units)}"
                f" counted units would raise the alarm with a chance of {figures.percent(power)}",
            )
        )
    return rows
