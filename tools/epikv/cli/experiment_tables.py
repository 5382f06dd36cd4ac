"""How experiments look to people."""

from collections.abc import Sequence
from datetime import timedelta

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table

from epikv.cli import show
from epikv.experiment import reading
from epikv.messages import enum_name
from epikv.v1.experiment_pb2 import Experiment, Metric


def all_of(experiments: Sequence[Experiment]) -> None:
    table = Table("experiment", "state", "traffic", "layer", "arms", "decides")
    for each in experiments:
        arms = ", ".join(f"{arm.name} {_percent(arm.weight_permille)}" for arm in each.arms)
        share = _percent(each.traffic_permille)
        table.add_row(each.name, _word(each, "state"), share, each.layer, arms, each.primary_metric)
    show.out.print(table)


def one(experiment: Experiment) -> None:
    show.out.print(f"{experiment.name}: {_word(experiment, 'state')}")
    if experiment.hypothesis:
        show.out.print(reading.plain(experiment.hypothesis))
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(experiment):
        if value:
            facts.add_row(name, reading.plain(value))
    show.out.print(facts)
    arms = Table("arm", "share", "sets")
    for arm in experiment.arms:
        name = f"{arm.name} (control)" if arm.control else arm.name
        arms.add_row(name, _percent(arm.weight_permille), reading.sets(arm))
    show.out.print(arms)
    if experiment.metrics:
        metrics = Table("metric", "kind", "better", "covariate")
        for metric in experiment.metrics:
            metrics.add_row(metric.name, *_of_metric(metric))
        show.out.print(metrics)


def traffic(experiment: Experiment) -> str:
    """Who takes part, as far as a hash says."""
    share = f"{_percent(experiment.traffic_permille)} of layer {experiment.layer}"
    if not experiment.HasField("start_time"):
        return share
    first = experiment.first_bucket
    return f"{share}, its buckets {first} to {first + 10 * experiment.traffic_permille - 1}"


def _facts(experiment: Experiment) -> list[tuple[str, str]]:
    salt = f", salt {experiment.salt}" if experiment.salt not in ("", experiment.name) else ""
    stopped = _time(experiment, "stop_time")
    reason = f", {experiment.stop_reason}" if experiment.stop_reason else ""
    return [
        ("traffic", traffic(experiment)),
        ("takes part", _eligibility(experiment)),
        ("switchback", reading.windows_of(experiment)),
        ("subgroups", reading.subgroups_of(experiment)),
        ("pairs", reading.pairs_of(experiment)),
        ("buckets", f"version {experiment.bucket_version}{salt}"),
        ("decides", experiment.primary_metric),
        ("alpha", f"{experiment.alpha:g}"),
        ("guardrails", ", ".join(f"{g.metric} by {g.margin:g}" for g in experiment.guardrails)),
        ("outcomes taken for", _duration(experiment)),
        ("created", _time(experiment, "create_time")),
        ("started", _time(experiment, "start_time")),
        ("ends", _time(experiment, "end_time")),
        ("stopped", f"{stopped}{reason}"),
        ("etag", experiment.etag),
    ]


def _eligibility(experiment: Experiment) -> str:
    asked = experiment.eligibility
    facts = [f"model {asked.model}"] if asked.model else []
    if asked.min_prompt_tokens:
        facts.append(f"prompts of {asked.min_prompt_tokens} tokens or more")
    facts += [f"{name}={value}" for name, value in sorted(asked.labels.items())]
    return ", ".join(facts) or "any request"


def _of_metric(metric: Metric) -> tuple[str, str, str]:
    direction = _word(metric, "direction").removesuffix("_is_better")
    covariate = _word(metric, "covariate")
    return _word(metric, "kind"), direction, covariate if metric.covariate else ""


def _word(message: Message, field: str) -> str:
    enum = message.DESCRIPTOR.fields_by_name[field].enum_type
    assert enum is not None  # of these fields there is one
    return enum_name(enum, getattr(message, field))


def _time(experiment: Experiment, field: str) -> str:
    if not experiment.HasField(field):
        return ""
    at: Timestamp = getattr(experiment, field)
    return at.ToDatetime().strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(experiment: Experiment) -> str:
    if not experiment.HasField("outcome_window"):
        return ""
    return str(timedelta(seconds=experiment.outcome_window.seconds))


def _percent(permille: int) -> str:
    return f"{permille / 10:g}%"
