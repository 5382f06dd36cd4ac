"""The load generator: when it sends, what it counts, and what it makes of that."""

import math
import os
import signal
import threading
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import grpc
import pytest
from epikv.bench.generator import UNFINISHED, ClosedLoop, Generator, OpenLoop, Retries
from epikv.bench.report import Window, figures
from epikv.bench.workload import Workload, parse_arm, parse_lengths, poisson
from epikv.eval.forms import AnswerError
from epikv.eval.items import Item
from epikv.options import Kv
from fake_epikvd import serve
from scripted_load import SECONDS, WORKLOAD, Scripted, refuse, scripted

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


def test_a_judge_that_fails_ends_the_load() -> None:
    def judge(text: str) -> list[bool]:
        raise AnswerError("no judge")

    items = [Item("a", "first", judge, stop_strings=("Q:",))]
    workload = Workload(WORKLOAD.arms, WORKLOAD.prompt, WORKLOAD.output, 50, problems=items)
    assert list(workload.request(0)[1].stop.stop_strings) == ["Q:"]
    for pattern in (ClosedLoop(2, math.inf, 4), OpenLoop([0, 0.01], 1)):
        with serve(generation=Scripted(lambda *_: None, False)) as fake:
            with pytest.raises(AnswerError, match="no judge"):
                Generator(fake.address, workload).run(pattern)


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


@pytest.mark.parametrize(
    ("left", "run", "delay", "hopeless"),
    [
        ("0.010", "0.020", None, True),
        ("0.030", "0.020", None, False),  # the wait was too long: it should have a delay
        ("0.010", "0.020", 1.0, False),
    ],
)
def test_no_delay_is_missed_where_none_would_help(
    left: str, run: str, delay: float | None, hopeless: bool
) -> None:
    estimate = {"seconds_left": left, "run_seconds": run}
    with scripted(lambda _, context: refuse(context, delay, None, estimate), refuses=True) as fake:
        (sample,) = Generator(fake, WORKLOAD).run(OpenLoop([0.0], SECONDS)).samples
    assert (sample.refused, sample.retry_delay, sample.hopeless) == (True, delay, hopeless)


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
