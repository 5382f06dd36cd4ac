"""What `epikv plan capacity` says of a load, beside what the load then finds.

One replica: a daemon of the sample model, whose steps are measured as the command measures them, in turns that lie
between the loads: so both have the same moments of a machine that others share. Loads are Poisson arrivals at
shares of what it can do, and closed loops. Latencies are held against the daemon's own word (Summary.timings);
those of its client, which shares its cores, stand beside them, with what requests take outside of the daemon. Each load
also has its pace: what its own steps took over what they cost by the plan. A prediction at that pace says how
much of an error is the steps', and how much the queue's.

Replicas whose steps sleep for what a plan says that steps cost (epikv_lab.bench.executor): one of them alone,
which no neighbour slows down; and three, since three daemons that compute would share the cores of this machine.
Loads go to HAProxy (leastconn) and to Envoy (by prefix, with bounded load) before the three. What is told apart
here is what a balancer and queues make of steps.

A simulation has the same arrivals and lengths as its load. Where a balancer's choice is chance (which replica a
hash names, who is first of two), it is drawn again and again, and the median counts. Figures are of the requests
of all rounds. An error is what is measured over what was predicted, less 1. Rounds are the same load again, so what
they differ by is the machine's: no prediction can be nearer.
"""

import math
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from epikv import harness
from epikv.admin import Admin
from epikv.bench.generator import ClosedLoop, Generator, OpenLoop, Pattern
from epikv.bench.report import Window as Counted
from epikv.bench.report import figures
from epikv.bench.workload import Arm as BenchArm
from epikv.bench.workload import Workload, parse_arm, parse_lengths, poisson
from epikv.plan.costs import TICKS, Costs, Settings, ticks
from epikv.plan.fleet import Closed, Open, Result, Window, quantile, simulate
from epikv.plan.measuring import Load, Measurement, Shape, Timed, fitted_seconds, settled
from epikv.plan.replica import FULL, Arm, Call, Model
from epikv.scrape import Page
from epikv.stats import Estimate, bootstrap
from epikv.testing import Daemon
from epikv.v1 import generation_pb2

from epikv_lab.bench import balancers
from epikv_lab.bench.fleet import executor
from epikv_lab.bench.targets import Target, finish

WITHIN = 0.1  # of what was predicted
SHARES = (0.3, 0.6, 0.85)  # of what a replica can do
USERS = 16  # of the closed loops
BUDGET = "sliding:64"  # of one of them
REPLICAS = 3
DRAWS = 15  # of which replica a prefix's hash names, and who is first of those with as few calls
ALONE = 50  # requests that the overhead of one is measured with
# Steps that sleep: as of a large model, so that this machine's delays are little beside them.
SLEEPING = Costs(
    Settings(kv_capacity_tokens=6000, context_length=2048, vocabulary=100, max_running_requests=24),
    base=((0, 0.04), (1, 0.04), (24, 0.06)),
    prefill=1e-4,
    attended=2e-6,
    request=1e-3,
)
_WARMUP_SHARE = 0.15


@dataclass(frozen=True)
class _Whole(Workload):
    """Whose answers are as long as they may be. Prompts that another load has had, too, are cached if
    its salt is the same."""

    salt: str = ""

    def request(self, number: int) -> tuple[int, generation_pb2.GenerateRequest]:
        arm, request = super().request(number)
        request.stop.ignore_eos = True
        request.kv.cache_salt = self.salt
        return arm, request


@dataclass(frozen=True)
class Case:
    """A load: at a rate, requests a second, or of so many users."""

    name: str
    workload: _Whole
    rate: float | None = None
    users: int | None = None

    def pattern(self, seconds: float) -> Pattern:
        if self.users is not None:
            return ClosedLoop(self.users, seconds)
        assert self.rate is not None
        return OpenLoop(poisson(self.rate, seconds, self.workload.seed), seconds)


@click.command("capacity")
@click.option("--model", type=click.Path(exists=True), required=True, help="The sample model.")
@click.option("--envoy", default="envoy", show_default=True, help="Its program.")
@click.option("--haproxy", default="haproxy", show_default=True, help="Its program.")
@click.option("--measure", "measuring", default=40.0, show_default=True, help="Seconds, of steps.")
@click.option("--seconds", default=60.0, show_default=True, help="Of a load.")
@click.option("--rounds", default=3, show_default=True, help="Of each load.")
@click.option(
    "--only",
    type=click.Choice(["computing", "sleeping"]),
    help="One that computes, or those that sleep.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    model: str,
    envoy: str,
    haproxy: str,
    measuring: float,
    seconds: float,
    rounds: int,
    only: str | None,
    json_file: Path | None,
) -> None:
    """Throughput and latencies that a plan predicts, beside those that are measured."""
    load = [os.getloadavg()[0]]
    told: dict[str, Any] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    if only != "sleeping":
        found |= _computing(model, measuring, seconds, rounds)
    if only != "computing":
        found |= _sleeping(envoy, haproxy, seconds, rounds)
    load.append(os.getloadavg()[0])
    targets = []
    click.echo(f"{'':<34}" + "".join(f"{name:>24}" for name in FIGURES))
    for name, rounds_of in found.items():
        of = {
            side: _pooled([each[side] for each in rounds_of])
            for side in rounds_of[0]
            if side != "pace"
        }
        for figure in FIGURES:
            error = _error(figure, [each["measured"] for each in rounds_of], of["predicted"])
            targets.append(Target(f"{name}_{figure}_error", error, WITHIN))
        _row(name, of["predicted"], of["measured"])
        if "pace" in rounds_of[0]:
            paces = [each["pace"] for each in rounds_of]
            pace = f"  at its pace {median(paces):.2f} ({min(paces):.2f} to {max(paces):.2f})"
            _row(pace, of["at_pace"], of["measured"])
            _row("  by its client", of["client_predicted"], of["client_measured"])
        for side in of:
            of[side]["rounds"] = [_pooled([each[side]]) for each in rounds_of]
        if rounds > 1:
            cells = [f"{share:.0%}" for share in _spread(of["measured"]["rounds"])]
            title = "  most between two rounds"
            click.echo(f"{title:<34}" + "".join(f"{cell:>24}" for cell in cells))
        told[name] = of
    finish("capacity", targets, {"load_average": load, "cases": told}, json_file)


@dataclass(frozen=True)
class Outcome:
    """Of a load, or of its simulation: of the requests that came in the window, seconds."""

    tokens_per_second: float
    first: Sequence[float]
    end: Sequence[float]


FIGURES: dict[str, Callable[[Sequence[Outcome]], float]] = {
    "tokens_per_second": lambda runs: fmean(run.tokens_per_second for run in runs),
    "first_p50": lambda runs: _quantile([run.first for run in runs], 0.5),
    "first_p99": lambda runs: _quantile([run.first for run in runs], 0.99),
    "end_p50": lambda runs: _quantile([run.end for run in runs], 0.5),
    "end_p99": lambda runs: _quantile([run.end for run in runs], 0.99),
}


def _quantile(runs: Sequence[Sequence[float]], share: float) -> float:
    return quantile(array("d", chain.from_iterable(runs)), share)


def _pooled(rounds: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """The figures of the requests of all rounds together. Of each round so many draws: the median of
    theirs."""
    draws = list(zip(*rounds, strict=True))
    found = {name: median(figure(draw) for draw in draws) for name, figure in FIGURES.items()}
    return {"requests": sum(len(run.end) for run in draws[0]), **found}


def _spread(rounds: Sequence[Mapping[str, float]]) -> list[float]:
    """Of each figure the most by which one round is above another."""
    return [max(r[name] for r in rounds) / min(r[name] for r in rounds) - 1 for name in FIGURES]


def _row(name: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> None:
    cells = [
        f"{predicted[each]:.4g}, {measured[each]:.4g} ({measured[each] / predicted[each] - 1:+.0%})"
        for each in FIGURES
    ]
    click.echo(f"{name:<34}" + "".join(f"{cell:>24}" for cell in cells))


def _error(
    figure: str, rounds: Sequence[Sequence[Outcome]], predicted: Mapping[str, float]
) -> Estimate:
    def of(runs: Sequence[Sequence[Outcome]]) -> float:
        return abs(FIGURES[figure]([run for [run] in runs]) / predicted[figure] - 1)

    return bootstrap(rounds, of)


def _computing(
    model: str, measuring: float, seconds: float, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    prompt, output = parse_lengths("lognormal:120:0.7:700"), parse_lengths("uniform:16:96")
    with Daemon(model, "--threads=1") as daemon, daemon.client() as client:
        [facts] = client.models()
        with Admin(daemon.admin) as admin:
            config = admin.config()
        settings = Settings(
            facts.kv_capacity_tokens,
            facts.context_length,
            facts.vocab_size,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            max_step_tokens=config["max_step_tokens"],
            prefill_chunk_tokens=config["prefill_chunk_tokens"],
            max_running_requests=config["max_running_requests"],
        )
        measurement = Measurement(
            daemon.grpc,
            daemon.metrics,
            settings,
            [FULL, _plan_arm(parse_arm(BUDGET))],
            prompt.most,
            client.policies(),
        )
        harness.say(f"measuring steps: {measurement.loads} loads in turns")
        measurement.run(measuring)
        full, budget = (
            _Whole([parse_arm(arm)], prompt, output, facts.vocab_size) for arm in ("full", BUDGET)
        )
        most = _most(measurement.costs(), full)
        harness.say(f"most: {most:.2f} requests/s")
        cases = [Case(f"computing_at_{share:g}", full, rate=share * most) for share in SHARES]
        cases.append(Case("computing_closed", full, users=USERS))
        cases.append(Case("computing_closed_budget", budget, users=USERS))
        loads: list[_Sent] = []
        for turn in range(rounds):
            for case in cases:
                measurement.run(measuring / len(cases), rounds=1)
                loads.append(_send(case, turn, daemon.grpc, seconds, daemon.metrics))
        costs = measurement.costs()
        harness.say(f"cost model off by {100 * costs.error:.1f} %")
        costs = _with_overhead(costs, replace(full, salt="alone"), daemon.grpc)
    return _predicted(loads, costs, 1, "round-robin")


def _most(costs: Costs, workload: Workload) -> float:
    """Requests a second that a replica ends which never lacks any."""
    window = Window(100, 300)
    arrivals = Closed(_calls(workload, count()), costs.settings.max_running_requests, window.end)
    result = simulate(costs, [FULL], arrivals, window, replicas=1, routing="round-robin")
    return result.answers / window.seconds


def _sleeping(
    envoy: str, haproxy: str, seconds: float, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    prompt, output = parse_lengths("lognormal:120:0.7:700"), parse_lengths("uniform:8:40")
    workload = _Whole([parse_arm("full")], prompt, output, SLEEPING.settings.vocabulary)
    most = _most(SLEEPING, workload)
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        SLEEPING.save(folder / "costs.json")
        sleeping = f"--costs={folder / 'costs.json'}"
        replicas = [stack.enter_context(executor(sleeping)) for _ in range(REPLICAS)]
        by_connections = balancers.haproxy(folder, replicas, haproxy)
        by_prefix = balancers.envoy(folder, replicas, envoy)
        for name, way, number, routing in (
            ("alone", nullcontext(replicas[0]), 1, "round-robin"),
            ("haproxy", by_connections, REPLICAS, "least-connections"),
            ("envoy", by_prefix, REPLICAS, "prefix"),
        ):
            address = stack.enter_context(way)
            costs = _with_overhead(SLEEPING, workload, address)
            cases = [
                Case(f"sleeping_{name}_at_{share:g}", workload, rate=share * number * most)
                for share in SHARES
            ]
            loads = [
                _send(case, turn, address, seconds) for turn in range(rounds) for case in cases
            ]
            found |= _predicted(loads, costs, number, routing)
    return found


def _with_overhead(costs: Costs, workload: Workload, address: str) -> Costs:
    """With what requests take beside their steps, measured of some that are alone."""
    load = Generator(address, workload).run(ClosedLoop(1, math.inf, ALONE))
    model = Model(costs, [FULL])
    first, end = [], []
    for sample, call in zip(load.samples, _calls(workload, count()), strict=False):
        ideal_first, ideal_end = model.idle_ticks(call)
        assert sample.first_token is not None
        first.append(sample.first_token - ideal_first / TICKS)
        end.append(sample.end_to_end - ideal_end / TICKS)
    return replace(costs, before_first=max(median(first), 0), before_end=max(median(end), 0))


def _plan_arm(arm: BenchArm) -> Arm:
    budget = arm.kv.budget
    assert not isinstance(budget, str)
    return Arm(arm.kv.policy, budget)


def _calls(workload: Workload, numbers: Iterator[int]) -> Iterator[Call]:
    """Its requests, each with a beginning of its own."""
    for number in numbers:
        _, request = workload.request(number)
        output = request.stop.max_output_tokens
        yield Call(0, len(request.token_ids.ids), output, output, talk=number)


@dataclass(frozen=True)
class _Sent:
    """A load that a daemon had, and what it found."""

    case: Case
    counted: Counted
    measured: Outcome  # by its client
    # Of the one daemon: by its own word, and what its counters say.
    told: Outcome | None = None
    steps: Load | None = None


def _send(case: Case, turn: int, address: str, seconds: float, metrics: str = "") -> _Sent:
    """turn: of its rounds, so that no prompt is cached by the one before. metrics: the address of the one
    daemon's."""
    workload = replace(case.workload, salt=f"{case.name}/{turn}")
    counted = Counted(_WARMUP_SHARE * seconds, seconds)
    before = settled(metrics) if metrics else Page({})
    load = Generator(address, workload).run(case.pattern(seconds))
    page = settled(metrics) - before if metrics else Page({})
    told = figures(load.samples, counted)
    if load.interrupted or told["errors"]:
        raise click.ClickException(f"{case.name}: {told['errors'] or 'interrupted'}")
    own = [sample for sample in load.samples if sample.scheduled in counted]
    measured = Outcome(
        told["output_tokens_per_second"],
        [s.first_token for s in own if s.first_token is not None],
        [s.end_to_end for s in own],
    )
    harness.say(f"{case.name}: {_shown(_pooled([[measured]]))}")
    if not metrics:
        return _Sent(case, counted, measured)
    calls = islice(_calls(workload, count()), len(load.samples))
    requests = [Timed(call.prompt, call.output, 0, 0, 0, 0) for call in calls]
    [arm] = workload.arms
    shape = Shape(case.users or 1, workload.prompt.most, workload.output.most, _plan_arm(arm))
    by_daemon = replace(
        measured,
        first=[s.told_first_token for s in own if s.told_first_token is not None],
        end=[s.told_end for s in own if s.told_end is not None],
    )
    return _Sent(case, counted, measured, by_daemon, Load(shape, requests, page))


def _predicted(
    loads: Sequence[_Sent], costs: Costs, replicas: int, routing: str
) -> dict[str, list[dict[str, Any]]]:
    """Of each case, by round: what was measured and what is predicted; and at the load's own pace, if it
    has one."""

    def draws(sent: _Sent, costs: Costs, by_client: bool = True) -> list[Outcome]:
        """by_client: with what requests take outside of the daemon."""
        first, end = (0.0, 0.0) if by_client else (costs.before_first, costs.before_end)
        each = (
            _simulate(sent.case, costs, replicas, routing, sent.counted, draw)
            for draw in range(DRAWS)
        )
        return [
            Outcome(
                r.output_tokens_per_second,
                [took - first for took in r.first_token],
                [took - end for took in r.end_to_end],
            )
            for r in each
        ]

    found: dict[str, list[dict[str, Any]]] = {}
    for sent in loads:
        done: dict[str, Any] = {"measured": [sent.measured], "predicted": draws(sent, costs)}
        if sent.told is not None and sent.steps is not None:
            done = {f"client_{side}": of for side, of in done.items()}
            pace = sent.steps.seconds / fitted_seconds(costs, sent.steps)
            done |= {
                "measured": [sent.told],
                "predicted": draws(sent, costs, by_client=False),
                "pace": pace,
                "at_pace": draws(sent, costs.at_pace(pace), by_client=False),
            }
        found.setdefault(sent.case.name, []).append(done)
    return found


def _shown(told: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in told.items())


def _simulate(
    case: Case, costs: Costs, replicas: int, routing: str, window: Counted, draw: int
) -> Result:
    calls = _calls(case.workload, count())
    arrivals: Open | Closed
    if case.users is not None:
        arrivals = Closed(calls, case.users, window.end)
    else:
        assert case.rate is not None
        arrivals = Open(_at(calls, poisson(case.rate, window.end, case.workload.seed)), window.end)
    return simulate(
        costs,
        [_plan_arm(arm) for arm in case.workload.arms],
        arrivals,
        Window(window.begin, window.end),
        replicas=replicas,
        routing=routing,
        seed=draw,
    )


def _at(calls: Iterator[Call], times: Iterator[float]) -> Iterator[Call]:
    for at, call in zip(times, calls, strict=False):
        call.at = ticks(at)
        yield call
