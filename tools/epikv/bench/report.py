"""What a load's samples amount to: load.schema.json says what each figure is."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import quantiles
from typing import Any

import click

from epikv.bench.generator import KEPT, NO_ARM, Load, Sample
from epikv.bench.watch import Readings
from epikv.stats import wilson

PERCENTILES = (50, 90, 99)

# A generator above these is suspected to be what it measures.
_MOST_CORE_SHARE = 0.8
_MOST_LAG_SECONDS = 0.01
_MOST_LAG_SHARE = 0.1  # of the median time to the first token


@dataclass(frozen=True)
class Window:
    """The seconds of a load that count. A request's latencies belong to the window in which it was
    to arrive; throughput and goodput count the tokens that arrive in it, so that goodput is a part
    of throughput."""

    begin: float
    end: float
    deadline: float | None = None  # seconds

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def __contains__(self, at: float) -> bool:
        return self.begin <= at < self.end

    def has_passed(self, sample: Sample) -> bool:
        """Whether its deadline had passed as it was sent."""
        return self.deadline is not None and sample.sent - sample.scheduled >= self.deadline

    def met(self, sample: Sample) -> bool:
        """Whether it succeeded within its deadline."""
        return sample.ok and (self.deadline is None or sample.end_to_end <= self.deadline)


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Linear between the closest ranks; None of no values."""
    found = list(values)
    if not found:
        return None
    cuts = quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
    return {f"p{p}": cuts[p - 1] for p in PERCENTILES}


def figures(samples: Sequence[Sample], window: Window) -> dict[str, Any]:
    """Of the requests of one arm, or of all."""
    arrived = [s for s in samples if s.scheduled in window]
    ended = [s for s in samples if s.ended in window]
    ok = [s for s in arrived if s.ok]
    refused = [s for s in arrived if s.refused]
    again = [s for s in arrived if s.attempt > 1]
    judged = [s.right for s in arrived if s.right is not None]
    outcomes = Counter(s.outcome for s in arrived if s.outcome)
    return {
        "n": len(arrived),
        "ok": len(ok),
        "met_deadline": sum(map(window.met, arrived)),
        "errors": dict(sorted(Counter(s.error for s in arrived if s.error).items())),
        "refused": len(refused),
        "refused_with_delay": sum(s.retry_delay is not None for s in refused),
        "refused_hopeless": sum(s.hopeless for s in refused),
        "sent_too_late": sum(window.has_passed(s) for s in arrived),
        "retry_delay": percentiles(s.retry_delay for s in refused if s.retry_delay is not None),
        "retries": len(again),
        "retries_ok": sum(s.ok for s in again),
        "time_to_first_token": percentiles(
            s.first_token for s in arrived if s.first_token is not None
        ),
        "inter_token": percentiles(
            after - before for s in arrived for (before, _), (after, _) in pairwise(s.messages)
        ),
        "end_to_end": percentiles(s.end_to_end for s in ok),
        "queue": percentiles(s.queue for s in ok if s.queue is not None),
        "requests_per_second": sum(s.ok for s in ended) / window.seconds,
        "output_tokens_per_second": _arrived(samples, window) / window.seconds,
        "goodput_tokens_per_second": goodput(samples, window),
        "output_tokens": percentiles(s.tokens for s in ok),
        "judged": len(judged),
        "right": asdict(wilson(sum(judged), len(judged))) if judged else None,
        "outcomes": outcomes.pop(KEPT, 0),
        "outcome_errors": dict(sorted(outcomes.items())),
    }


def goodput(samples: Iterable[Sample], window: Window) -> float:
    """Output tokens a second, of the requests that succeed within their deadline, also after the
    window."""
    return _arrived(filter(window.met, samples), window) / window.seconds


def _arrived(samples: Iterable[Sample], window: Window) -> int:
    """Tokens in the window."""
    return sum(tokens for s in samples for at, tokens in s.messages if at in window)


def timeline(samples: Iterable[Sample], window: Window, step: float) -> list[dict[str, float]]:
    """Goodput in, and requests under way at the begin of, each whole `step` seconds of the window."""
    count = int(window.seconds / step + 1e-9)
    tokens, changes = [0] * count, [0] * (count + 1)

    def bin_of(at: float) -> int:
        return math.floor((at - window.begin) / step)

    for s in samples:
        for at, arrived in s.messages if window.met(s) else ():
            if 0 <= bin_of(at) < count:
                tokens[bin_of(at)] += arrived
        # Under way at the begins of the bins after its first moment, up to that of its last.
        changes[min(max(bin_of(s.sent) + 1, 0), count)] += 1
        changes[min(max(bin_of(s.ended) + 1, 0), count)] -= 1
    return [
        {
            "at": window.begin + number * step,
            "goodput_tokens_per_second": tokens[number] / step,
            "under_way": under_way,
        }
        for number, under_way in enumerate(accumulate(changes[:-1]))
    ]


def report(load: Load, arms: Sequence[str], window: Window, readings: Readings) -> dict[str, Any]:
    """Everything but how it was asked for; `readings` are of the daemon meanwhile."""
    samples = load.samples
    total = figures(samples, window)
    return {
        "interrupted": load.interrupted,
        "window": {"begin": window.begin, "end": window.end},
        "total": total,
        "arms": {
            name: figures([s for s in samples if s.arm == index], window)
            for index, name in enumerate(arms)
        },
        "experiment_arms": {
            name: figures([s for s in samples if s.experiment_arm == name], window)
            for name in experiment_arms(load)
        },
        "generator": _generator(load, window, total, readings.cpu_seconds),
        "timeline": timeline(samples, window, step=1),
        "probes": probes(readings),
        "gauges": [{"at": at - load.begin, **values} for at, values in readings.gauges],
    }


def experiment_arms(load: Load) -> list[str]:
    """Of the experiments that its requests took part in, as the server tells them."""
    return sorted({s.experiment_arm for s in load.samples} - {NO_ARM})


def probes(readings: Readings) -> dict[str, Any]:
    """How soon a health check and a scrape are answered."""
    return {
        "health": percentiles(seconds for _, seconds in readings.health),
        "scrape": percentiles(seconds for _, seconds in readings.scrapes),
        "failures": readings.failures,
    }


def _generator(
    load: Load, window: Window, total: Mapping[str, Any], watch_cpu: float
) -> dict[str, Any]:
    lag = percentiles(s.sent - s.scheduled for s in load.samples if s.scheduled in window)
    core = load.cpu_seconds / load.seconds
    first = total["time_to_first_token"]
    late = (
        lag is not None
        and first is not None
        and lag["p99"] > max(_MOST_LAG_SECONDS, _MOST_LAG_SHARE * first["p50"])
    )
    return {
        "cpu_seconds": load.cpu_seconds + watch_cpu,
        "share_of_core": core,
        "share_of_machine": (core + watch_cpu / load.seconds) / (os.cpu_count() or 1),
        "send_lag": lag,
        "bottleneck": late or core > _MOST_CORE_SHARE,
    }


def show(found: Mapping[str, Any]) -> None:
    """Prints a report for people."""
    rows = list(found["arms"].items())
    if len(rows) > 1:
        rows.append(("total", found["total"]))
    rows += found["experiment_arms"].items()
    click.echo(_line("", "n", "ok", "on time", "tokens/s", "goodput", "requests/s"))
    for name, f in rows:
        rates = [f"{f[k]:.1f}" for k in ("output_tokens_per_second", "goodput_tokens_per_second")]
        counts = (f["n"], f["ok"], f["met_deadline"])
        click.echo(_line(name, *counts, *rates, f"{f['requests_per_second']:.2f}"))
    for title, key in (
        ("time to first token, ms", "time_to_first_token"),
        ("between tokens, ms", "inter_token"),
        ("end to end, ms", "end_to_end"),
        ("queue (the server's word), ms", "queue"),
    ):
        click.echo("\n" + _line(title, *(f"p{p}" for p in PERCENTILES)))
        for name, f in rows:
            values = ["-"] * len(PERCENTILES)
            if f[key] is not None:
                values = [f"{1e3 * value:.1f}" for value in f[key].values()]
            click.echo(_line(name, *values))
    if any(f["right"] for _, f in rows):
        click.echo(
            "\n" + _line("right answers", "judged", "share", "[95 %", "interval]", "outcomes")
        )
    for name, f in rows:
        if f["right"] is not None:
            shares = [f"{f['right'][key]:.3f}" for key in ("value", "low", "high")]
            click.echo(_line(name, f["judged"], *shares, f["outcomes"]))
    click.echo()
    for name, f in rows:
        for error, count in f["errors"].items():
            click.echo(f"{name}: {count} of {f['n']} ended with {error}")
        for error, count in f["outcome_errors"].items():
            click.echo(f"{name}: {count} outcomes were refused with {error}")
    total = found["total"]
    if total["refused"]:
        delay = total["retry_delay"]
        click.echo(
            f"refused: {total['refused']}, {total['refused_with_delay']} of them with a delay"
            + (f" (p50 {delay['p50']:.2f} s, p99 {delay['p99']:.2f})" if delay else "")
            + f", {total['refused_hopeless']} with too little time left for any"
            + f"; sent again after it: {total['retries']}, of which {total['retries_ok']} succeeded"
        )
    if total["sent_too_late"]:
        click.echo(f"sent by the generator after their deadline: {total['sent_too_late']}")
    generator = found["generator"]
    lag = generator["send_lag"]
    click.echo(
        f"generator: {100 * generator['share_of_core']:.0f} % of a core,"
        f" {100 * generator['share_of_machine']:.0f} % of the machine"
        + (f"; sent {1e3 * lag['p50']:.1f} ms late, p99 {1e3 * lag['p99']:.1f}" if lag else "")
    )
    if generator["bottleneck"]:
        click.echo(
            "warning: the generator is near its limit: its own delay is in these latencies",
            err=True,
        )


def _line(name: str, *values: object) -> str:
    return f"{name:<30}" + "".join(f"{value!s:>12}" for value in values)
