"""`epikv plan`: what a workload needs, before machines are bought."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv import harness

if TYPE_CHECKING:
    from epikv.plan.capacity import Answer, Planner
    from epikv.plan.costs import Costs
    from epikv.plan.workload import Workload

_ROUTINGS = ("random", "round-robin", "least-connections", "prefix")
_POSITIVE = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(dir_okay=False, path_type=Path)
_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("plan")
def group() -> None:
    """Tell what a workload needs, from what one replica was measured to do."""


@group.command("capacity")
@click.argument("workload_file", metavar="[WORKLOAD]", required=False, type=_EXISTING)
@click.option(
    "--costs",
    "costs_file",
    type=_FILE,
    required=True,
    help="What the replica's steps cost. If it is not there, they are measured and it is written.",
)
@click.option("--model", type=_EXISTING, help="To measure: start a daemon on this model file.")
@click.option("--flag", "flags", multiple=True, help="Of that daemon; again for more.")
@click.option("--admin", metavar="HOST:PORT", help="Of --server: its admin port, for its settings.")
@click.option(
    "--measure", type=_POSITIVE, default=40, show_default=True, help="Seconds of measuring."
)
@click.option("--traffic", type=_EXISTING, help="Lengths, policies and rate of this access log.")
@click.option("--rate", type=_POSITIVE, help="Requests a second, of the whole fleet.")
@click.option("--prompt", help="Tokens: N, uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:MOST.")
@click.option("--output", help="Output tokens; forms as for --prompt.")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="POLICY[:BUDGET[:WEIGHT]]",
    help="Of the mix; again for more. [default: full]",
)
@click.option("--deadline", type=_POSITIVE, help="Seconds until the last token.")
@click.option("--first-token", type=_POSITIVE, help="Seconds until the first token.")
@click.option(
    "--share",
    type=click.FloatRange(0.5, 0.9999),
    default=0.99,
    show_default=True,
    help="Of the requests, those that have to meet them.",
)
@click.option(
    "--routing",
    "routings",
    type=click.Choice(_ROUTINGS),
    multiple=True,
    help="Again for more. [default: least-connections, and prefix where requests begin alike]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 10_000),
    help="Say what so many do, instead of how many are needed.",
)
@click.option("--replica-cost", type=_POSITIVE, help="Of one, an hour, in any currency.")
@click.option(
    "--half-policy",
    default="sliding",
    show_default=True,
    help="Of requests without a budget, when budgets are halved.",
)
@click.option("--seed", type=int, help="Of arrivals, lengths and chance. [default: 0]")
@harness.options
def capacity(
    workload_file: Path | None,
    costs_file: Path,
    model: Path | None,
    flags: tuple[str, ...],
    admin: str | None,
    measure: float,
    traffic: Path | None,
    share: float,
    routings: tuple[str, ...],
    replicas: int | None,
    replica_cost: float | None,
    half_policy: str,
    seed: int | None,
    json_file: Path | None,
    server: str | None,
    metrics: str | None,
    binary: Path | None,
    **asked: Any,
) -> None:
    """Say how many replicas a workload needs, and what they cost.

    WORKLOAD is a TOML or JSON file; options go over it. The steps of one replica are measured once,
    on --model or at --server, and kept in --costs; later plans need no daemon. Then fleets are
    simulated, by the daemon's rules of queue, admission and batches, until the fewest replicas are
    found that meet the deadline: behind each --routing, and with half the budgets.
    """
    from epikv.plan.capacity import Planner, Unfit, check
    from epikv.plan.costs import Costs

    workload = _workload(workload_file, traffic, {**asked, "seed": seed})
    if costs_file.exists():
        costs = Costs.load(costs_file)
        if model is not None or server is not None:
            harness.say(f"{costs_file} is there: steps are not measured again")
    elif model is None and server is None:
        raise click.UsageError(
            f"{costs_file} is not there: give --model or --server, and steps are measured"
        )
    else:
        where = {"server": server, "metrics": metrics, "binary": binary}
        costs = _measured(workload, half_policy, model, flags, admin, measure, where)
        costs.save(costs_file)
    names = routings or (
        ("least-connections", "prefix") if workload.shares else ("least-connections",)
    )
    planner = Planner(costs, share, harness.say)
    try:
        check(costs, workload)
        if replicas is not None:
            answers = [planner.run(workload, name, replicas) for name in names]
            half = None
        else:
            answers = [planner.needed(workload, name) for name in names]
            best = min(answers, key=lambda answer: answer.replicas)
            half = _half(planner, workload, half_policy, best.routing)
    except Unfit as error:
        raise click.ClickException(str(error)) from error
    _show(workload, costs, share, replicas, answers, half, replica_cost)
    if json_file is not None:
        told = {
            "answers": [answer.told(replica_cost) for answer in answers],
            "half_budgets": half and half.told(replica_cost),
            "share": share,
            "deadline": workload.deadline,
            "first_token": workload.first_token,
            "rate": workload.rate,
            "seed": workload.seed,
            "costs_error": costs.error,
        }
        json_file.write_text(json.dumps(told, indent=1) + "\n")


def _workload(file: Path | None, traffic: Path | None, asked: dict[str, Any]) -> "Workload":
    from epikv.plan.workload import build, read, read_log

    given = read(file) if file is not None else {}
    given |= {name: value for name, value in asked.items() if value not in (None, ())}
    workload = build(given, read_log(traffic) if traffic is not None else None)
    if workload.deadline is None and workload.first_token is None:
        raise click.UsageError(
            "give --deadline or --first-token: replicas are needed for something"
        )
    return workload


def _measured(
    workload: "Workload",
    half_policy: str,
    model: Path | None,
    flags: Sequence[str],
    admin: str | None,
    seconds: float,
    where: dict[str, Any],
) -> "Costs":
    from epikv.admin import Admin
    from epikv.plan.costs import Settings
    from epikv.plan.measuring import measure
    from epikv.plan.replica import Arm

    def path() -> Path:
        assert model is not None
        return model

    with harness.serving(path, flags, **where) as served:
        described = served.client.policies()
        [facts, *others] = served.client.models()
        if others:
            raise click.UsageError("the daemon serves several models; measure one that serves one")
        settings = Settings(
            facts.kv_capacity_tokens,
            facts.context_length,
            facts.vocab_size,
            kv_bytes_per_token=facts.kv_bytes_per_token,
        )
        if address := served.admin or admin:
            with Admin(address) as operator:
                config = operator.config()
            known = (
                "max_step_tokens",
                "prefill_chunk_tokens",
                "max_running_requests",
                "max_queued_requests",
                "prefix_cache_share",
            )
            settings = replace(settings, **{name: config[name] for name in known if name in config})
        else:
            click.echo(
                "without --admin the daemon's settings are taken to be the defaults", err=True
            )
        arms = list(dict.fromkeys([*workload.arms, Arm(half_policy, 0.5)]))
        names = {policy.name for policy in described}
        for arm in arms:
            if arm.policy not in names:
                raise click.UsageError(f"the daemon has no policy '{arm.policy}'")
        longest = max(call.prompt for call in workload.longest)
        return measure(
            served.address,
            served.metrics,
            settings,
            arms,
            longest,
            seconds,
            described,
            harness.say,
        )


def _half(planner: "Planner", workload: "Workload", policy: str, routing: str) -> "Answer | None":
    """With half of each budget; None, with a word why, if that cannot be."""
    from epikv.plan.capacity import Unfit

    try:
        return planner.needed(workload.with_half_budgets(policy), routing)
    except Unfit as error:
        click.echo(f"half the budgets: {error}", err=True)
        return None


def _show(
    workload: "Workload",
    costs: "Costs",
    share: float,
    asked: int | None,
    answers: "Sequence[Answer]",
    half: "Answer | None",
    per_hour: float | None,
) -> None:
    limits = []
    if workload.deadline is not None:
        limits.append(f"the answer within {workload.deadline:g} s")
    if workload.first_token is not None:
        limits.append(f"the first token within {workload.first_token:g} s")
    click.echo(f"{workload.rate:.4g} requests/s; of {100 * share:g} % {' and '.join(limits)}\n")
    rows = [(answer.routing, answer) for answer in answers]
    if half is not None:
        rows.append((f"{half.routing}, half budgets", half))
    heads = ["replicas", "late %", "first p50", "p99", "answer p50", "p99", "tokens/s", "cached %"]
    click.echo(f"{'':<32}" + "".join(f"{head:>11}" for head in heads) + "    per million")
    for name, a in rows:
        seconds = (a.first_token_p50, a.first_token_p99, a.end_to_end_p50, a.end_to_end_p99)
        values = [
            str(a.replicas),
            f"{100 * a.late:.2f}",
            *(f"{value:.3g} s" for value in seconds),
            f"{a.output_tokens_per_second:.0f}",
            f"{100 * a.hit_rate:.0f}",
        ]
        cost = "-" if per_hour is None else f"{a.cost_per_million(per_hour):.3g}"
        click.echo(f"{name:<32}" + "".join(f"{value:>11}" for value in values) + f"{cost:>15}")
    click.echo()
    if asked is None:
        for answer in answers:
            needed = "1 replica is" if answer.replicas == 1 else f"{answer.replicas} replicas are"
            click.echo(f"{answer.routing}: {needed} needed.")
        by_name = {answer.routing: answer.replicas for answer in answers}
        if half is not None:
            click.echo(_saves("Half the budgets", by_name[half.routing], half.replicas))
        others = [answer for answer in answers if answer.routing != "prefix"]
        if "prefix" in by_name and others:
            other = min(others, key=lambda answer: answer.replicas)
            what = f"Prefix affinity beside {other.routing}"
            click.echo(_saves(what, other.replicas, by_name["prefix"]))
    click.echo(f"The cost model is off by {100 * costs.error:.1f} % in the median of its loads.")
    if costs.paces:
        low, high = costs.pace_range()
        click.echo(f"In nine of ten moments steps took {low:.2f} to {high:.2f} times their mean.")


def _saves(what: str, before: int, after: int) -> str:
    if after == before:
        return f"{what}: {before} replicas as well."
    more, count = ("fewer", before - after) if after < before else ("more", after - before)
    return f"{what}: {after} replicas, {count} {more} than {before} ({100 * count / before:.0f} %)."
