"""What is made of a load: outcomes, latencies, goodput, capacity, overload and their pictures."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from epikv.bench import capacity, plots
from epikv.bench.generator import ClosedLoop, Generator, Load, Sample
from epikv.bench.report import Window, figures, goodput, percentiles, report, timeline
from epikv.bench.watch import Readings
from epikv.bench.workload import Workload, parse_arm, parse_lengths
from epikv.eval.items import Item
from epikv.v1 import (
    experiment_pb2,
    experiment_pb2_grpc,
)
from epikv_lab.bench import overload
from fake_epikvd import serve
from scripted_load import WORKLOAD, Scripted, refuse, sample


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
        Sample(0, 15, sent=17.5, ended=17.5, error="DEADLINE_EXCEEDED"),
        sample(15, 16, 0, error="DEADLINE_EXCEEDED/DEADLINE_INFEASIBLE", hopeless=True),
        sample(19, 21, tokens=50),  # ends after it
    ]
    found = figures(samples, Window(10, 20, deadline=2.5))
    assert (found["n"], found["ok"], found["met_deadline"]) == (9, 4, 3)
    assert found["errors"] == {
        "DEADLINE_EXCEEDED": 2,
        "DEADLINE_EXCEEDED/DEADLINE_INFEASIBLE": 2,
        "RESOURCE_EXHAUSTED/QUEUE_FULL": 1,
    }
    assert (found["refused"], found["refused_with_delay"], found["refused_hopeless"]) == (3, 2, 1)
    assert found["sent_too_late"] == 1
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
    # No delay would have helped it: it is not missed.
    samples.append(sample(1, 1.1, 0, "DEADLINE_EXCEEDED/DEADLINE_INFEASIBLE", hopeless=True))
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
