"""What `epikv plan capacity` says of a load, beside what the load then finds.

One replica: a daemon of the sample model, whose steps are measured as the command measures them. Then loads
are sent to it: Poisson arrivals at shares of what it can do, and a closed loop.

Three replicas: their steps sleep for what a plan says that steps cost (epikv_lab.bench.executor), since three
daemons that compute would share the cores of this machine. Loads go to HAProxy (leastconn) and to Envoy (by
prefix, with bounded load) before them. What is told apart here is what a balancer and queues make of steps.

A simulation has the same arrivals and lengths as its load. Where a balancer's choice is chance (which replica a
hash names, who is first of two), it is drawn again and again, and the median counts. An error is what is measured over what was
predicted, less 1, in the median of the rounds. Rounds are the same load again, so what they differ by is the
machine's: no prediction can be nearer.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
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
from epikv.plan.fleet import Closed, Open, Window, quantile, simulate
from epikv.plan.measuring import measure
from epikv.plan.replica import FULL, Arm, Call, Model
from epikv.stats import bootstrap
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
ALONE = 20  # requests that the overhead of one is measured with
# Steps that sleep: as of a large model, so that this machine's delays are little beside them.
SLEEPING = Costs(
    Settings(kv_capacity_tokens=6000, context_length=2048, vocabulary=100, max_running_requests=24),
    base=((0, 0.04), (1, 0.04), (24, 0.06)),
    prefill=1e-4,
    attended=2e-6,
    request=1e-3,
)
_WARMUP_SHARE = 0.15
_FIGURES = ("tokens_per_second", "first_p50", "first_p99", "end_p50", "end_p99")


class _Whole(Workload):
    """Whose answers are as long as they may be."""

    def request(self, number: int) -> tuple[int, generation_pb2.GenerateRequest]:
        arm, request = super().request(number)
        request.stop.ignore_eos = True
        return arm, request


@dataclass(frozen=True)
class Case:
    """A load: at a rate, requests a second, or of so many users."""

    name: str
    workload: Workload
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
    "--only", type=click.Choice(["one", "three"]), help="One replica alone, or three alone."
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
    found: dict[str, dict[str, Any]] = {}
    if only != "three":
        found |= _one(model, measuring, seconds, rounds)
    if only != "one":
        found |= _three(envoy, haproxy, seconds, rounds)
    load.append(os.getloadavg()[0])
    targets = []
    click.echo(f"{'':<34}" + "".join(f"{name:>24}" for name in _FIGURES))
    for name, case in found.items():
        cells = []
        for figure in _FIGURES:
            measured = [each[figure] for each in case["measured"]]
            predicted = case["predicted"][figure]
            cells.append(f"{predicted:.4g} / {median(measured):.4g}")
            targets.append(Target(f"{name}_{figure}_error", _error(measured, predicted), WITHIN))
        click.echo(f"{name:<34}" + "".join(f"{cell:>24}" for cell in cells))
        case["between_rounds"] = _spread(case["measured"])
        case["between_draws"] = _spread(case["predicted_draws"])
        for title in ("between_rounds", "between_draws"):
            cells = [f"{100 * share:.1f} %" for share in case[title].values()]
            title = "  most " + title.replace("_", " two ")
            click.echo(f"{title:<34}" + "".join(f"{cell:>24}" for cell in cells))
    finish("capacity", targets, {"load_average": load, "cases": found}, json_file)


def _spread(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure the most by which one run is above another."""
    return {name: max(r[name] for r in runs) / min(r[name] for r in runs) - 1 for name in _FIGURES}


def _error(measured: Sequence[float], predicted: float) -> Any:
    return bootstrap(
        [value / predicted for value in measured], lambda ratios: abs(median(ratios) - 1)
    )


def _one(model: str, measuring: float, seconds: float, rounds: int) -> dict[str, Any]:
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
        costs = measure(
            daemon.grpc,
            daemon.metrics,
            settings,
            [FULL, _plan_arm(parse_arm(BUDGET))],
            prompt.most,
            measuring,
            client.policies(),
            harness.say,
        )
        full, budget = (
            _Whole([parse_arm(arm)], prompt, output, facts.vocab_size) for arm in ("full", BUDGET)
        )
        most = _most(costs, full)
        harness.say(f"cost model off by {100 * costs.error:.1f} %; most: {most:.2f} requests/s")
        cases = [Case(f"one_at_{share:g}", full, rate=share * most) for share in SHARES]
        cases.append(Case("one_closed", full, users=USERS))
        cases.append(Case("one_closed_budget", budget, users=USERS))
        found = _cases(cases, rounds, costs, daemon.grpc, 1, "round-robin", seconds)
        return {name: {**case, "cost_error": costs.error} for name, case in found.items()}


def _most(costs: Costs, workload: Workload) -> float:
    """Requests a second that a replica ends which never lacks any."""
    window = Window(100, 300)
    arrivals = Closed(_calls(workload, count()), costs.settings.max_running_requests, window.end)
    result = simulate(costs, [FULL], arrivals, window, replicas=1, routing="round-robin")
    return result.answers / window.seconds


def _three(envoy: str, haproxy: str, seconds: float, rounds: int) -> dict[str, Any]:
    prompt, output = parse_lengths("lognormal:120:0.7:700"), parse_lengths("uniform:8:40")
    workload = _Whole([parse_arm("full")], prompt, output, SLEEPING.settings.vocabulary)
    rate = REPLICAS * _most(SLEEPING, workload)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        SLEEPING.save(folder / "costs.json")
        sleeping = f"--costs={folder / 'costs.json'}"
        replicas = [stack.enter_context(executor(sleeping)) for _ in range(REPLICAS)]
        ways = {
            "haproxy": (balancers.haproxy(folder, replicas, haproxy), "least-connections"),
            "envoy": (balancers.envoy(folder, replicas, envoy), "prefix"),
        }
        for name, (way, routing) in ways.items():
            address = stack.enter_context(way)
            costs = _with_overhead(SLEEPING, workload, address)
            cases = [
                Case(f"three_{name}_at_{share:g}", workload, rate=share * rate) for share in SHARES
            ]
            found |= _cases(cases, rounds, costs, address, REPLICAS, routing, seconds)
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


def _cases(
    cases: Sequence[Case],
    rounds: int,
    costs: Costs,
    address: str,
    replicas: int,
    routing: str,
    seconds: float,
) -> dict[str, Any]:
    """What is predicted and what is measured of each, the rounds of all in turns."""
    measured: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    counted = Counted(_WARMUP_SHARE * seconds, seconds)
    for _ in range(rounds):
        for case in cases:
            load = Generator(address, case.workload).run(case.pattern(seconds))
            told = figures(load.samples, counted)
            if load.interrupted or told["errors"]:
                raise click.ClickException(f"{case.name}: {told['errors'] or 'interrupted'}")
            measured[case.name].append(
                {
                    "requests": told["n"],
                    "generator_share_of_core": load.cpu_seconds / load.seconds,
                    "tokens_per_second": told["output_tokens_per_second"],
                    "first_p50": told["time_to_first_token"]["p50"],
                    "first_p99": told["time_to_first_token"]["p99"],
                    "end_p50": told["end_to_end"]["p50"],
                    "end_p99": told["end_to_end"]["p99"],
                }
            )
            harness.say(f"{case.name}: {_shown(measured[case.name][-1])}")
    found = {}
    for case in cases:
        draws = [
            _predict(case, costs, replicas, routing, seconds, draw)
            for draw in range(DRAWS if replicas > 1 else 1)
        ]
        predicted = {name: median(draw[name] for draw in draws) for name in draws[0]}
        harness.say(f"{case.name}, predicted: {_shown(predicted)}")
        found[case.name] = {
            "rate": case.rate,
            "users": case.users,
            "predicted": predicted,
            "predicted_draws": draws,
            "measured": measured[case.name],
        }
    return found


def _shown(told: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in told.items())


def _predict(
    case: Case, costs: Costs, replicas: int, routing: str, seconds: float, draw: int
) -> dict[str, float]:
    calls = _calls(case.workload, count())
    arrivals: Open | Closed
    if case.users is not None:
        arrivals = Closed(calls, case.users, seconds)
    else:
        assert case.rate is not None
        arrivals = Open(_at(calls, poisson(case.rate, seconds, case.workload.seed)), seconds)
    result = simulate(
        costs,
        [_plan_arm(arm) for arm in case.workload.arms],
        arrivals,
        Window(_WARMUP_SHARE * seconds, seconds),
        replicas=replicas,
        routing=routing,
        seed=draw,
    )
    return {
        "requests": result.requests,
        "tokens_per_second": result.output_tokens_per_second,
        "first_p50": quantile(result.first_token, 0.5),
        "first_p99": quantile(result.first_token, 0.99),
        "end_p50": quantile(result.end_to_end, 0.5),
        "end_p99": quantile(result.end_to_end, 0.99),
    }


def _at(calls: Iterator[Call], times: Iterator[float]) -> Iterator[Call]:
    for at, call in zip(times, calls, strict=False):
        call.at = ticks(at)
        yield call
