"""`epikv bench overload`: whether a daemon at twice its capacity does as much good as at capacity.

Measured first: the median of an idle daemon, of which the deadline is three times; its answers to
health checks and scrapes while idle; and its capacity, which is the most requests a second that a
closed loop completes within the deadline, over 1, 2, 4, ... at once. Then two open loops, at
capacity and at twice that.

A share of the requests that are refused with a delay is sent again after it, with a deadline of its
own, be it after the overload: delays grow with it. The share is small on purpose: at twice the
capacity half of all requests cannot be served, and if all of those came again meanwhile, no more
than half of them could succeed however the daemon chose.

--json: `at_capacity` and `overloaded` are as in load.schema.json, from `interrupted` on.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from epikv import harness
from epikv.bench import capacity, plots
from epikv.bench.generator import Generator, Load, OpenLoop, Retries, Sample
from epikv.bench.load import connections as connections_option
from epikv.bench.load import names, run, serving, settings, workload_options
from epikv.bench.report import Window, probes, show, timeline
from epikv.bench.watch import Watch
from epikv.bench.workload import poisson
from epikv.processes import INTERRUPTED
from epikv.stats import Estimate, bootstrap

from epikv_lab.bench.targets import Target, finish

FACTOR = 2  # of the capacity
DEADLINE = 3  # of the idle median
WARMUP_SECONDS = 5.0
IDLE_WATCH_SECONDS = 0.05  # between two probes
BLOCK_SECONDS = 5  # of goodput: samples of the bootstrap

GOODPUT_RATIO, RETRY_SUCCESS, TIMES_IDLE = 0.9, 0.5, 10
RSS_GROWTH, QUEUE_GROWTH = 1.02, 1.2  # of the last third over the first


@click.command("overload")
@workload_options
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.1),
    default=5,
    show_default=True,
    help="Of each of the two open loops.",
)
@click.option(
    "--measure",
    type=click.FloatRange(min=0, min_open=True),
    default=10,
    show_default=True,
    help="Seconds for the idle median, and for each step of the capacity; thrice that for answers"
    " while idle.",
)
@click.option(
    "--retry-share",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="Of requests refused with a delay, sent again after it.",
)
@connections_option
@click.option(
    "--plots",
    "plots_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for the pictures of the two open loops.",
)
@harness.options
def command(
    minutes: float,
    measure: float,
    retry_share: float,
    connections: int,
    plots_folder: Path | None,
    json_file: Path | None,
    **where: Any,
) -> None:
    """Goodput, refusals, memory and answers of a daemon at twice its capacity.

    Of --server's daemon, or of one that is started on --model with EPIKVD_FLAGS. With the defaults
    it takes up to 18 minutes.
    """
    if plots_folder is not None:
        plots.check()
    with serving(where, needs_metrics=True) as (served, workload):
        generator = Generator(served.address, workload, connections=connections)
        with Watch(served.address, served.metrics, IDLE_WATCH_SECONDS) as watch:
            harness.say("idle: health checks and scrapes")
            time.sleep(3 * measure)
        idle: dict[str, Any] = {"probes": probes(watch.readings)}
        idle["median_seconds"] = capacity.idle_median(generator, measure)
        generator.deadline = DEADLINE * idle["median_seconds"]
        found = capacity.measure(generator, measure)
        rate, runs = found.best.requests_per_second, []
        for factor in (1, FACTOR):
            harness.say(f"open loop: {factor * rate:.2f} requests/s for {minutes:g} minutes")
            seconds = WARMUP_SECONDS + 60 * minutes
            arrivals = poisson(factor * rate, seconds, workload.seed)
            pattern = OpenLoop(arrivals, seconds, retry_share)
            runs.append(run(served, generator, pattern, WARMUP_SECONDS, 60 * minutes))
            load, window, report = runs[-1]
            click.echo(f"\nat {factor} x capacity, {factor * rate:.2f} requests/s\n")
            show(report)
            if plots_folder is not None:
                folder = plots_folder / f"{factor}x"
                plots.draw(folder, load, names(workload), window, report)
            if load.interrupted:
                sys.exit(INTERRUPTED)
            served.wait_until_idle()
        again = [sample for sample in load.samples if sample.attempt > 1]
        if pattern.due:
            harness.say(f"retries that are due after the load: {len(pattern.due)}")
            after = generator.run(Retries(pattern.due))
            again += after.samples
            if after.interrupted:
                sys.exit(INTERRUPTED)
    click.echo()
    details = {
        "settings": {
            **settings(workload, generator),
            "retry_share": retry_share,
            "duration_seconds": 60 * minutes,
        },
        "idle": idle,
        "capacity": asdict(found),
        "at_capacity": runs[0][2],
        "overloaded": runs[1][2],
        "retries": {
            "meanwhile": sum(s.attempt > 1 for s in load.samples),
            "later": len(pattern.due),
            "ok": sum(s.ok for s in again),
        },
    }
    finish("overload", _targets(idle, runs, again), details, json_file)


def _targets(
    idle: Mapping[str, Any],
    runs: Sequence[tuple[Load, Window, dict[str, Any]]],
    again: Sequence[Sample],
) -> list[Target]:
    load, window, report = runs[1]
    meanwhile = [s.ok for s in load.samples if s.attempt > 1]
    ok = [s.ok for s in again]
    click.echo(
        f"retries: of {len(meanwhile)} during the overload {sum(meanwhile)} succeeded, of"
        f" {len(again) - len(meanwhile)} after it {sum(ok) - sum(meanwhile)}"
    )
    retries = bootstrap(ok, fmean) if ok else Estimate.exact(0)
    total = report["total"]
    helped = total["refused"] - total["refused_hopeless"]
    told = total["refused_with_delay"] / helped if helped else 0.0
    gauges = [g for g in report["gauges"] if g["at"] in window]
    resident = [g["resident_bytes"] for g in gauges]
    # All that the daemon holds: what waits may count as running. One more, at all times: a queue of
    # none may become one of few.
    held = [1 + g["waiting"] + g["running"] for g in gauges]
    click.echo("over time, MiB resident:" + _tenths(resident, 2**20))
    click.echo("over time, requests held:" + _tenths(held, 1))
    targets = [
        Target("goodput_ratio", goodput_ratio(*runs), GOODPUT_RATIO, at_least=True),
        Target("refusals_with_delay", Estimate.exact(told), 1, at_least=True),
        Target("retry_success", retries, RETRY_SUCCESS, at_least=True),
        Target("rss_growth", Estimate.exact(_growth(resident, median)), RSS_GROWTH),
        Target("queue_growth", Estimate.exact(_growth(held, fmean)), QUEUE_GROWTH),
    ]
    for probe in ("health", "scrape"):
        before, during = idle["probes"][probe], report["probes"][probe]
        times = during["p99"] / before["p99"] if during else float("inf")
        click.echo(
            f"{probe}: p99 {1e3 * before['p99']:.2f} ms idle"
            + (f", {1e3 * during['p99']:.2f} ms overloaded" if during else "")
        )
        targets.append(Target(f"{probe}_p99_over_idle", Estimate.exact(times), TIMES_IDLE))
    failures = Estimate.exact(len(report["probes"]["failures"]))
    return [*targets, Target("probes_unanswered", failures, 0)]


def goodput_ratio(*runs: tuple[Load, Window, Any]) -> Estimate:
    """Of the second run over the first, resampled by blocks of time."""
    blocks = [
        [
            point["goodput_tokens_per_second"]
            for point in timeline(load.samples, window, BLOCK_SECONDS)
        ]
        for load, window, _ in runs
    ]

    def ratio(pairs: Sequence[tuple[float, float]]) -> float:
        first, second = (sum(column) for column in zip(*pairs, strict=True))
        return second / first if first else 0.0

    return bootstrap(list(zip(*blocks, strict=True)), ratio)


def _tenths(values: Sequence[float], unit: float) -> str:
    """Means of tenths of the time."""
    size = max(len(values) // 10, 1)
    parts = [values[i : i + size] for i in range(0, size * (len(values) // size), size)]
    return "".join(f" {fmean(part) / unit:.0f}" for part in parts)


def _growth(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> float:
    """Of the last third over the first."""
    third = len(values) // 3
    if third == 0:
        raise click.ClickException("the daemon was read too seldom: give it more --minutes")
    return middle(values[-third:]) / middle(values[:third])
