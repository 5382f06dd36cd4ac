"""The load generator: when it sends, what it counts, and what it makes of that."""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import fake_epikvd
import grpc
import jsonschema
import pytest
from click.testing import CliRunner
from epikv.bench import capacity, plots
from epikv.bench import load as load_command
from epikv.bench.generator import UNFINISHED, ClosedLoop, Generator, Load, OpenLoop, Retries, Sample
from epikv.bench.report import Window, figures, goodput, percentiles, report, timeline
from epikv.bench.watch import Readings, Watch
from epikv.bench.workload import Workload, parse_arm, parse_lengths, poisson
from epikv.cli import main
from epikv.eval.items import Item
from epikv.options import Kv
from epikv.v1 import (
    errors_pb2,
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from epikv_lab.bench import overload
from fake_epikvd import accepted, serve, summary
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration

WORKLOAD = Workload([parse_arm("full")], parse_lengths("4"), parse_lengths("2"), vocabulary=50)
SECONDS = 30  # no test waits as long unless it fails


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Accepts, calls `before` with the number of the request, and streams its tokens. refuses:
    `before` comes first."""

    def __init__(self, before: Callable[[int, grpc.ServicerContext], None], refuses: bool) -> None:
        self._before, self._refuses, self._numbers = before, refuses, iter(range(1_000_000))

    def Generate(self, request, context):
        number = next(self._numbers)
        if self._refuses:
            self._before(number, context)
        yield generation_pb2.GenerateResponse(accepted=accepted(request))
        if not self._refuses:
            self._before(number, context)
        for token in range(request.stop.max_output_tokens):
            yield generation_pb2.GenerateResponse(
                delta=generation_pb2.Delta(token_ids=[token, token])
            )
        end = summary()
        end.timings.queue.nanos = 250_000_000
        yield generation_pb2.GenerateResponse(summary=end)


@contextmanager
def scripted(
    before: Callable[[int, grpc.ServicerContext], None] = lambda *_: None, refuses: bool = False
) -> Iterator[str]:
    with serve(generation=Scripted(before, refuses), threads=32) as fake:
        yield fake.address


def sample(scheduled: float, ended: float, tokens: int = 1, error: str = "", **more) -> Sample:
    """Its tokens come one by one, the last one at its end."""
    first = scheduled + (ended - scheduled) / 2
    step = (ended - first) / max(tokens - 1, 1)
    messages = [(first + step * i if tokens > 1 else ended, 1) for i in range(tokens)]
    return Sample(0, scheduled, scheduled, messages=messages, ended=ended, error=error, **more)


# What is asked.


def test_an_arm_is_a_policy_a_budget_and_a_weight() -> None:
    assert parse_arm("full").kv == Kv("full") and parse_arm("full").weight == 1
    assert parse_arm("full::3").name == "full" and parse_arm("full::3").weight == 3
    assert (
        parse_arm("sliding:256").kv.budget == 256 and parse_arm("sliding:256").name == "sliding:256"
    )
    assert parse_arm("h2o:0.5:2.5").kv.budget == 0.5 and parse_arm("h2o:50%").kv.budget == 0.5
    assert isinstance(parse_arm("h2o:1.0").kv.budget, float)
    for spec, said in {
        ":256": "no policy",
        "h2o:many": "is not a number of tokens",
        "h2o:1:0": "weight",
        "h2o:1:nan": "weight",
        "h2o:1:2:3": "weight",
    }.items():
        with pytest.raises(ValueError, match=said):
            parse_arm(spec)


def test_lengths_come_from_their_distributions() -> None:
    draw = Random(1)
    assert {parse_lengths("7").draw(draw) for _ in range(9)} == {7}
    assert parse_lengths("fixed:7").most == parse_lengths("7").least == 7
    uniform = parse_lengths("uniform:3:5")
    assert {uniform.draw(draw) for _ in range(200)} == {3, 4, 5}
    lognormal = parse_lengths("lognormal:100:0.5:300")
    drawn = sorted(lognormal.draw(draw) for _ in range(4000))
    assert drawn[-1] <= 300 and drawn.count(300) < 20, "drawn again, not cut off"
    assert 95 <= drawn[2000] <= 105
    # Of a lognormal, 84 % lie below median * exp(sigma); the cut at 300 takes 1.4 % off.
    below = sum(tokens < 100 * math.exp(0.5) for tokens in drawn) / len(drawn)
    assert below == pytest.approx(0.853, abs=0.02)
    for spec in ("", "0", "1.5", "x", "uniform:5:3", "uniform:1", "lognormal:9:0:10", "normal:1:2"):
        with pytest.raises(ValueError, match="no distribution of lengths"):
            parse_lengths(spec)


def test_arrivals_are_a_poisson_process() -> None:
    times = list(poisson(rate=5, seconds=4000, seed=3))
    assert times == list(poisson(5, 4000, 3)) != list(poisson(5, 4000, 4))
    assert times == sorted(times) and times[0] > 0 and times[-1] < 4000
    assert len(times) == pytest.approx(20000, abs=4 * math.sqrt(20000))
    gaps = [b - a for a, b in pairwise(times)]
    # Of exponential gaps the deviation is the mean; none remembers the one before it.
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.03)
    assert sum(gap > 1 / 5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


def test_requests_are_the_same_by_number_and_seed() -> None:
    arms = [parse_arm("full"), parse_arm("sliding:32:3")]
    workload = Workload(
        arms, parse_lengths("uniform:2:9"), parse_lengths("uniform:1:4"), 50, seed=7
    )
    asked = [workload.request(number) for number in range(400)]
    assert asked == [workload.request(number) for number in range(400)]
    assert asked[0] != Workload(arms, workload.prompt, workload.output, 50, seed=8).request(0)
    assert sum(index for index, _ in asked) == pytest.approx(300, abs=40)
    for index, request in asked:
        assert 2 <= len(request.token_ids.ids) <= 9 and max(request.token_ids.ids) < 50
        assert request.kv == arms[index].kv.to_proto()
        assert request.output.token_ids and not request.output.text
    assert workload.extremes == [([0] * 2, 1), ([0] * 9, 4)]


# What is sent.


def test_problems_are_asked_in_turn_by_users_in_turn() -> None:
    items = [
        Item("a", "first", lambda text: [text == "1", text == "1"], trace_tokens=5),
        Item("b", "second one", lambda text: [text == "2"]),
    ]
    arms = [parse_arm("full"), parse_arm("sliding:32")]
    lengths = parse_lengths("4"), parse_lengths("uniform:2:30")
    workload = Workload(arms, *lengths, 50, units=3, problems=items)
    asked = [workload.request(number) for number in range(12)]
    assert asked == [workload.request(number) for number in range(12)]
    for number, (index, request) in enumerate(asked):
        assert request.text == items[number % 2].prompt
        assert request.stop.max_output_tokens == (13, 30)[number % 2]
        assert request.output.text and request.output.token_ids
        assert request.kv == arms[index].kv.to_proto()
        assert request.experiment.unit_id == asked[number % 3][1].experiment.unit_id
    assert len({request.experiment.unit_id for _, request in asked}) == 3
    assert workload.extremes == [("first", 13), ("second one", 30)]
    assert [workload.judge(n, "1") for n in range(3)] == [True, False, True]
    assert WORKLOAD.judge(0, "1") is None
    assert not WORKLOAD.request(0)[1].HasField("experiment")


def test_an_open_loop_waits_for_no_answer() -> None:
    """The server answers nobody before the last request is there: whoever waits would never end."""
    count, everyone = 12, threading.Barrier(12)
    arrivals = [0.02 * number for number in range(count)]
    with scripted(lambda *_: everyone.wait(SECONDS)) as address:
        load = Generator(address, WORKLOAD, connections=2).run(OpenLoop(arrivals, 1))
    assert len(load.samples) == count and all(s.ok for s in load.samples)
    first = min(load.samples, key=lambda s: s.scheduled)
    assert first.end_to_end >= arrivals[-1] and first.first_token >= arrivals[-1]
    assert (first.tokens, len(first.messages), first.queue) == (4, 2, 0.25)
    assert load.seconds >= arrivals[-1] and 0 < load.cpu_seconds < load.seconds * os.cpu_count()


def test_latency_counts_from_the_arrival_however_late_it_is_sent() -> None:
    with scripted() as address:
        load = Generator(address, WORKLOAD).run(OpenLoop([-5.0], 1))
        late = Generator(address, WORKLOAD, deadline=2).run(OpenLoop([-5.0], 1))
    [found] = load.samples
    assert found.ok and found.first_token >= 5 and found.end_to_end >= 5
    window = Window(-10, 10, deadline=5)
    assert figures(load.samples, window)["time_to_first_token"]["p50"] >= 5
    assert figures(load.samples, window)["met_deadline"] == 0
    assert late.samples[0].error == "DEADLINE_EXCEEDED" and late.samples[0].scheduled == -5


def test_a_closed_loop_keeps_its_number_at_once() -> None:
    at_once, most, lock, together = [0], [0], threading.Lock(), threading.Barrier(3)

    def before(number: int, _: grpc.ServicerContext) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        if number < 3:
            together.wait(SECONDS)
        with lock:
            at_once[0] -= 1

    with scripted(before) as address:
        load = Generator(address, WORKLOAD).run(ClosedLoop(3, 0.3))
    assert most[0] == 3 and len(load.samples) > 3
    assert all(s.ok and s.scheduled == pytest.approx(s.sent, abs=1) for s in load.samples)
    assert max(s.scheduled for s in load.samples) < 0.3


def refuse(context: grpc.ServicerContext, delay: float | None, pushback: str | None) -> None:
    details = [errors_pb2.ErrorInfo(reason="QUEUE_FULL", domain="epikv")]
    if delay is not None:
        details.append(errors_pb2.RetryInfo(retry_delay=Duration(nanos=int(delay * 1e9))))
    status = errors_pb2.Status(code=8, message="full", details=[pack(d) for d in details])
    trailers = [("grpc-status-details-bin", status.SerializeToString())]
    if pushback is not None:
        trailers.append(("grpc-retry-pushback-ms", pushback))
    context.set_trailing_metadata(trailers)
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


def pack(detail) -> any_pb2.Any:
    url = f"type.googleapis.com/google.rpc.{type(detail).__name__}"
    return any_pb2.Any(type_url=url, value=detail.SerializeToString())


@pytest.mark.parametrize(
    ("delay", "pushback", "attempts"),
    [(0.05, None, 2), (None, "50", 2), (None, None, 1), (None, "-1", 1), (None, "soon", 1)],
)
def test_a_refusal_is_sent_again_after_the_delay_it_asks_for(
    delay: float | None, pushback: str | None, attempts: int
) -> None:
    def before(number: int, context: grpc.ServicerContext) -> None:
        if number == 0:
            refuse(context, delay, pushback)

    with scripted(before, refuses=True) as address:
        load = Generator(address, WORKLOAD).run(OpenLoop([0.0], SECONDS, retry_share=1))
    first, *rest = load.samples
    assert first.refused and not first.accepted
    assert first.error == "RESOURCE_EXHAUSTED/QUEUE_FULL" and 1 + len(rest) == attempts
    for again in rest:
        assert again.ok and again.attempt == 2 and again.accepted and not again.refused
        assert again.scheduled == pytest.approx(first.ended + 0.05)
        assert again.sent >= again.scheduled


def test_no_retry_comes_twice_or_after_the_end() -> None:
    always = scripted(lambda _, context: refuse(context, 0.01, None), refuses=True)
    with always as address:
        within = Generator(address, WORKLOAD).run(OpenLoop([0.0], SECONDS, retry_share=1))
        generator, short = Generator(address, WORKLOAD), OpenLoop([0.0], 0.001, retry_share=1)
        after = generator.run(short)
        later = generator.run(Retries(short.due))
        unasked = Generator(address, WORKLOAD).run(OpenLoop([0.0], SECONDS, retry_share=0))
    assert [s.attempt for s in within.samples] == [1, 2]
    assert len(after.samples) == len(unasked.samples) == 1
    # What is left of it may be sent in a load of its own, at its time.
    (retry,), (first,) = later.samples, after.samples
    assert retry.attempt == 2 and retry.refused
    due = after.begin + first.ended + first.retry_delay
    assert later.begin + retry.scheduled == pytest.approx(due)


def test_interrupted_it_tells_what_there_is() -> None:
    def before(number: int, _: grpc.ServicerContext) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
            never.wait(1)

    never = threading.Event()
    with scripted(before) as address:
        load = Generator(address, WORKLOAD).run(ClosedLoop(1, SECONDS))
        never.set()
    assert load.interrupted and load.seconds < SECONDS
    assert [s.error for s in load.samples] == ["", UNFINISHED]


def test_every_request_shows_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(generation=Scripted(lambda *_: None, refuses=False)) as fake:
        Generator(fake.address, WORKLOAD).run(OpenLoop([0.0], SECONDS))
        monkeypatch.setenv("EPIKV_TOKEN", "secret")
        Generator(fake.address, WORKLOAD, connections=2).run(OpenLoop([0.0, 0.0], SECONDS))
        assert fake.tokens == [None, "Bearer secret", "Bearer secret"]


# What is counted.


class Outcomes(experiment_pb2_grpc.ExperimentServiceServicer):
    """Knows no request at first."""

    def __init__(self) -> None:
        self.told: list[experiment_pb2.RecordOutcomeRequest] = []

    def RecordOutcome(self, request, context):
        self.told.append(request)
        if len(self.told) == 1:
            refuse(context, 0.01, None)
        if request.metric == "unknown":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no experiment declares it")
        return experiment_pb2.RecordOutcomeResponse()


class Dealt(Scripted):
    """Every second request takes part in an experiment, by its arm "x/a"."""

    def Generate(self, request, context):
        for event in super().Generate(request, context):
            if event.HasField("accepted") and request.experiment.unit_id.endswith("1"):
                event.accepted.arm, event.accepted.request_id = "x/a", request.text
            yield event


@pytest.mark.parametrize("metric", ["right", "unknown"])
def test_outcomes_are_told_of_those_who_take_part(metric: str) -> None:
    items = [Item(name, name, lambda _, name=name: [name == "b"]) for name in "abcd"]
    arms, two = [parse_arm("full")], parse_lengths("2")
    workload = Workload(arms, two, two, 50, units=2, problems=items)
    outcomes = Outcomes()
    with serve(generation=Dealt(lambda *_: None, False), experiments=outcomes) as fake:
        load = Generator(fake.address, workload, outcome=metric).run(ClosedLoop(1, math.inf, 4))
    assert [told.request_id for told in outcomes.told] == ["b", "b", "d"]
    assert [told.value for told in outcomes.told] == [1, 1, 0]
    assert {told.metric for told in outcomes.told} == {metric}
    found = report(load, ["full"], Window(0, load.seconds), Readings())
    arm = found["experiment_arms"]["x/a"]
    assert (arm["n"], arm["judged"], arm["right"]["value"]) == (2, 2, 0.5)
    kept = {"right": (2, {}), "unknown": (0, {"INVALID_ARGUMENT": 2})}
    assert (arm["outcomes"], arm["outcome_errors"]) == kept[metric]
    assert found["total"]["judged"] == 4 and set(found["experiment_arms"]) == {"x/a"}


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentiles(range(101)) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([3.0, 1.0]) == {"p50": 2, "p90": 2.8, "p99": 2.98}
    assert percentiles([7.0]) == {"p50": 7, "p90": 7, "p99": 7}
    assert percentiles([]) is None


def test_figures_hold_requests_to_the_window_and_the_deadline() -> None:
    samples = [
        sample(1, 4, tokens=100),  # of the warm-up
        sample(9, 11, tokens=20),  # arrived before the window, ended in it
        sample(8, 10.4, tokens=1),
        sample(10, 12, tokens=30, queue=0.5),
        sample(11, 15, tokens=40, queue=1.5),  # late
        sample(12, 13, tokens=7, error="DEADLINE_EXCEEDED"),
        sample(13, 13, tokens=0, error="RESOURCE_EXHAUSTED/QUEUE_FULL", retry_delay=1.0),
        # Accepted, and dropped from the queue.
        sample(13, 13, tokens=0, error="DEADLINE_EXCEEDED/DEADLINE_INFEASIBLE", retry_delay=2.0),
        sample(14, 16, tokens=10, attempt=2),
        sample(19, 21, tokens=50),  # ends after it
    ]
    found = figures(samples, Window(10, 20, deadline=2.5))
    assert (found["n"], found["ok"], found["met_deadline"]) == (7, 4, 3)
    assert found["errors"] == {
        "DEADLINE_EXCEEDED": 1,
        "DEADLINE_EXCEEDED/DEADLINE_INFEASIBLE": 1,
        "RESOURCE_EXHAUSTED/QUEUE_FULL": 1,
    }
    assert (found["refused"], found["refused_with_delay"]) == (2, 2)
    assert found["retry_delay"]["p50"] == 1.5
    assert (found["retries"], found["retries_ok"]) == (1, 1)
    # As those of throughput, of the requests that were in time.
    assert found["goodput_tokens_per_second"] == (20 + 1 + 30 + 10) / 10
    assert found["requests_per_second"] == 5 / 10
    # 20 + 1 + 30 + 40 + 7 + 10; of 50 from 20 on, none.
    assert found["output_tokens_per_second"] == pytest.approx(108 / 10)
    assert found["end_to_end"]["p50"] == 2 and found["queue"]["p50"] == 1
    assert found["time_to_first_token"]["p99"] == pytest.approx(1.96, abs=0.03)
    assert goodput(samples, Window(10, 20)) == (20 + 1 + 30 + 40 + 10) / 10


def test_goodput_is_a_part_of_throughput() -> None:
    """Where requests end in the window that have begun long before, and others only after it."""
    samples = [sample(0, 11, tokens=90), sample(8, 24, tokens=60), sample(9, 19, 10, "CANCELLED")]
    window = Window(10, 20)
    found = figures(samples, window)
    arrived = [sum(1 for at, _ in s.messages if at in window) for s in samples]
    assert 0 < arrived[0] < 90 and 0 < arrived[1] < 60
    assert found["output_tokens_per_second"] == sum(arrived) / 10
    assert found["goodput_tokens_per_second"] == goodput(samples, window) == sum(arrived[:2]) / 10
    points = timeline(samples, window, step=1)
    assert sum(point["goodput_tokens_per_second"] for point in points) == sum(arrived[:2])


def test_inter_token_latency_is_between_messages() -> None:
    messages = [(1.0, 1), (1.5, 3), (3.0, 1)]
    found = figures([Sample(0, 0, 0, messages=messages, ended=3)], Window(0, 10))
    assert found["inter_token"]["p50"] == 1.0 and found["output_tokens_per_second"] == 0.5


def test_a_timeline_is_goodput_and_what_is_under_way() -> None:
    samples = [sample(-1, 2.5, 5), sample(0.5, 1.5, 8), sample(1.2, 9, 3), sample(2.1, 2.2, 1, "X")]
    points = timeline(samples, Window(0, 4, deadline=4), step=1)
    assert [point["at"] for point in points] == [0, 1, 2, 3]
    assert [point["goodput_tokens_per_second"] for point in points] == [1, 10, 2, 0]
    assert [point["under_way"] for point in points] == [1, 2, 2, 1]


def loaded(samples: list[Sample], seconds: float = 10, cpu: float = 1) -> Load:
    return Load(samples, begin=100, seconds=seconds, cpu_seconds=cpu, interrupted=False)


def test_a_generator_at_its_limit_says_so() -> None:
    quick, window = [sample(1, 2)], Window(0, 10)
    late = [Sample(0, 1, sent=1.2, messages=[(2.0, 1)], ended=2)]
    names, readings = ["full"], Readings(cpu_seconds=0.5)
    at_ease = report(loaded(quick), names, window, readings)["generator"]
    assert not at_ease["bottleneck"] and at_ease["share_of_core"] == 0.1
    assert at_ease["share_of_machine"] == pytest.approx(0.15 / os.cpu_count())
    assert at_ease["cpu_seconds"] == 1.5
    busy = report(loaded(quick, cpu=9), names, window, readings)["generator"]
    behind = report(loaded(late), names, window, readings)["generator"]
    assert busy["bottleneck"] and behind["bottleneck"]
    assert behind["send_lag"]["p99"] == pytest.approx(0.2)


# Capacity and overload.


def test_capacity_is_the_best_step_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that does 4 at once in a second and no more: from then on they take longer."""

    def run(_: Generator, pattern: ClosedLoop) -> Load:
        took = max(1, pattern.concurrency / 4)
        samples = [
            sample(begin, begin + took, 10)
            for begin in (took * turn for turn in range(int(pattern.seconds / took)))
            for _ in range(pattern.concurrency)
        ]
        return loaded(samples)

    monkeypatch.setattr(capacity, "run", run)
    found = capacity.measure(Generator("", WORKLOAD, deadline=1.5), seconds=41)
    assert [step.concurrency for step in found.steps] == [1, 2, 4, 8]
    assert found.best.concurrency == 4 and found.steps[-1].requests_per_second == 0
    assert found.best.requests_per_second == pytest.approx(4, rel=0.05)
    assert found.best.output_tokens_per_second == pytest.approx(40, rel=0.05)
    assert capacity.idle_median(Generator("", WORKLOAD), 20) == 1


def overloaded(
    tokens: int,
    retries: list[bool],
    failures: list[str],
    growth: float,
    delay: float | None = 1.0,
    leak: float = 0,
) -> tuple:
    samples = [sample(second, second + 0.5, tokens) for second in range(60)]
    for number, succeeded in enumerate(retries):
        error = "" if succeeded else "RESOURCE_EXHAUSTED"
        samples.append(sample(number, number + 0.1, 0, error, attempt=2, accepted=succeeded))
    samples.append(sample(1, 1.1, 0, "RESOURCE_EXHAUSTED", retry_delay=delay))
    readings = Readings(
        health=[(100 + second, 0.001 * growth) for second in range(60)],
        scrapes=[(100 + second, 0.002) for second in range(60)],
        gauges=[
            (
                100 + second,
                {
                    "resident_bytes": 1e9 + leak * second,
                    "waiting": 5 * growth**second,
                    "running": 1,
                },
            )
            for second in range(60)
        ],
        failures=failures,
    )
    window = Window(0, 60, deadline=1)
    load = loaded(samples, seconds=60)
    return load, window, report(load, ["full"], window, readings)


IDLE = {"probes": {"health": {"p99": 0.001}, "scrape": {"p99": 0.002}}}


def held(run: tuple) -> dict[str, bool]:
    again = [s for s in run[0].samples if s.attempt > 1]
    targets = overload._targets(IDLE, [overloaded(10, [], [], 1), run], again)
    return {target.metric: target.ok for target in targets}


def test_overload_is_held_to_its_targets() -> None:
    good = held(overloaded(10, [True] * 30, [], 1))
    assert len(good) == 8 and all(good.values())

    def short(*run: Any) -> set[str]:
        return {name for name, ok in held(overloaded(*run)).items() if not ok}

    # Refused retries carry no delay here.
    assert short(8, [True, False] * 15, [], 1) == {
        "goodput_ratio",
        "refusals_with_delay",
        "retry_success",
    }
    assert short(10, [True] * 30, [], 1, None) == {"refusals_with_delay"}
    assert short(10, [True] * 30, [], 1, 1.0, 1e6) == {"rss_growth"}
    unanswered = ["after 30.0 s: timed out"]
    assert short(10, [True] * 30, unanswered, 1.1) == {"queue_growth", "probes_unanswered"}
    assert short(10, [], [], 11) == {"retry_success", "queue_growth", "health_p99_over_idle"}


def test_pictures_begin_at_zero_and_say_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        figure_of, "savefig", lambda self, path, **_: drawn.update({path.name: self})
    )
    samples = [sample(5 + n, 8 + n, tokens=9) for n in range(4)]
    window = Window(5, 12, deadline=2.5)
    load = SimpleNamespace(samples=samples)
    found = {"timeline": timeline(samples, window, step=1), "gauges": [], "experiment_arms": {}}
    plots.draw(tmp_path, load, ["full"], window, found)
    goodput_panel, queue_panel = drawn["timeline.png"].axes
    assert goodput_panel.get_ylim()[0] == queue_panel.get_ylim()[0] == 0
    title = drawn["timeline.png"].get_suptitle()
    assert "Goodput" in title and "7 seconds" in title and "deadline of 2.50 s" in title
    assert "4 requests" in drawn["latency.png"].get_suptitle()
    assert all(panel.get_xlim()[0] == 0 for panel in drawn["latency.png"].axes)


# The commands.


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_a_load_is_told_as_its_schema_says(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    schema = json.loads((Path(load_command.__file__).parent / "load.schema.json").read_text())
    modes = (["--rate-of-capacity", "0.5", "--measure", "0.3"], ["--concurrency", "2"])
    for mode in modes:
        with scripted() as address:
            result = invoke(
                *("load", "--server", address, "--arm", "full", "--arm", "sliding:16", *mode),
                *("--prompt", "4", "--output", "2", "--duration", "1", "--warmup", "0.2"),
                *("--deadline", "20s", "--json", str(path), "--plots", str(tmp_path / "plots")),
            )
        assert result.exit_code == 0, result.output
        found = json.loads(path.read_text())
        jsonschema.validate(found, schema)
        assert found["total"]["ok"] == found["total"]["n"] > 0
        assert found["total"]["n"] == sum(arm["n"] for arm in found["arms"].values())
        assert found["probes"]["health"] is not None and found["gauges"] == []
        assert found["settings"]["deadline_seconds"] == 20
        for word in ("time to first token", "sliding:16", "% of the machine"):
            assert word in result.output
        for picture in ("latency", "timeline"):
            assert (tmp_path / "plots" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "plots" / "latency.png").unlink()


def test_a_daemon_of_ones_own_is_asked_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says of another one."""
    monkeypatch.setenv("EPIKV_TLS_CA", str(tmp_path / "absent.pem"))
    binary, model = tmp_path / "epikvd", tmp_path / "model.pt"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_epikvd.__file__} "$@"\n')
    binary.chmod(0o755)
    model.touch()
    mode = ("--concurrency", "1", "--duration", "0.2", "--warmup", "0")
    result = invoke("load", "--binary", str(binary), "--model", str(model), *mode)
    assert result.exit_code == 0, result.output


def test_bad_arguments_of_a_load_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise plots.click.UsageError("no matplotlib")

    for arguments, said in (
        ([], "give one of --rate"),
        (["--rate", "1", "--concurrency", "1"], "give one of --rate"),
        (["--concurrency", "1", "--retry-share", "1"], "--retry-share is of an open loop"),
        (["--rate", "1", "--requests", "9"], "--requests is of a closed loop"),
        (["--rate", "1", "--outcome", "right"], "--outcome needs --task"),
        (["--rate", "1", "--task", "needle@50"], "generates nothing"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--arm", "h2o:x"], "is not a number of tokens (256) or a share"),
        (["--rate", "1", "--prompt", "uniform:9:1"], "no distribution of lengths"),
        (["--rate", "1", "--deadline", "3y"], "neither seconds"),
        (["--rate", "1", "--deadline", "0"], "neither seconds"),
        (["--rate", "1", "--server", "x:1", "--", "--threads=1"], "leave out --model"),
        (["--rate", "1", "--server", "x:1", "--arm", "h2o", "--arm", "h2o"], "given twice"),
    ):
        result = invoke("load", *arguments)
        assert result.exit_code == 2 and said in result.output, result.output
    monkeypatch.setattr(plots, "check", refused)
    assert "no matplotlib" in invoke("load", "--rate", "1", "--plots", "x").output
    assert "--server needs --metrics" in invoke("overload", "--server", "x:1").output


def test_arms_that_the_daemon_refuses_are_told_together() -> None:
    with serve() as fake:
        arms = ("--arm", "nope", "--arm", "full", "--arm", "nope:5")
        result = invoke("load", "--server", fake.address, "--rate", "1", *arms)
        unknown = invoke("load", "--server", fake.address, "--rate", "1", "--model-name", "other")
    assert result.exit_code == 2
    assert result.output.count("kv.policy: unknown") == 4  # two arms, shortest and longest
    assert "nope:5, 96 + 96 tokens: INVALID_ARGUMENT (KV_BUDGET)" in result.output
    assert "'other'; the daemon serves fake" in unknown.output
    assert invoke("load", "--server", "127.0.0.1:1", "--rate", "1").exit_code == 2


PAGE = b"""\
process_resident_memory_bytes 5e+06
epikv_requests_waiting{model="m",reason="kv"} 3
epikv_requests_waiting{model="m",reason="running"} 4
epikv_requests_running{model="m"} 2
epikv_requests_running{model="other"} 1
epikv_requests_running_total{model="m"} 99
"""


def test_a_watch_that_fails_says_so() -> None:
    with Watch("127.0.0.1:1", "not an address", period=0.01) as watch:
        watch._process.kill()
    assert watch.readings.failures == ["the watch ended with status -9"]


def test_a_watch_reads_gauges_and_tells_what_goes_unanswered() -> None:
    asked, enough = iter(range(1_000_000)), threading.Event()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = next(asked)
            self.send_response(500 if number == 1 else 200)
            self.end_headers()
            self.wfile.write(PAGE)
            if number == 5:
                enough.set()

        def log_message(self, *_: object) -> None:
            pass

    with serve() as fake, ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as metrics:
        threading.Thread(target=metrics.serve_forever, daemon=True).start()
        with Watch(fake.address, f"127.0.0.1:{metrics.server_port}", period=0.01) as watch:
            assert enough.wait(SECONDS)
        metrics.shutdown()
    found = watch.readings
    assert found.health and len(found.scrapes) == len(found.gauges) >= 4
    assert len(found.failures) == 1 and "500" in found.failures[0]
    (due, gauges), (next_due, _) = found.gauges[1], found.gauges[2]
    assert gauges == {"resident_bytes": 5e6, "waiting": 7, "running": 3}
    assert next_due - due == pytest.approx(0.01), "due by the clock, not by the last answer"
    assert found.cpu_seconds > 0
