"""Fleets: queueing theory in a case that it knows, routings, and the same seed the same result."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from epikv.plan.costs import TICKS, Costs, Settings, ticks
from epikv.plan.fleet import Closed, Open, Result, Window, quantile, simulate
from epikv.plan.replica import FULL, Call
from epikv.plan.routing import ROUTINGS, ByPrefix, LeastConnections, maglev

ONE_PLACE = Costs(
    Settings(10**6, 10**6, 100, max_running_requests=1, max_queued_requests=10**9),
    base=((0, 1.0),),
    prefill=0.0,
)


def poisson(rate: float, seed: int, **more) -> Iterator[Call]:
    dice, at = random.Random(seed), 0.0
    for number in count():
        at += dice.expovariate(rate)
        yield Call(ticks(at), 10, 1, 1, talk=number, **more)


def run(costs: Costs, rate: float, seconds: float, routing: str, replicas: int, seed=0) -> Result:
    arrivals = Open(poisson(rate, seed), seconds)
    window = Window(0, seconds)
    return simulate(costs, [FULL], arrivals, window, replicas=replicas, routing=routing, seed=seed)


def test_waits_are_those_of_an_m_d_1_queue() -> None:
    """A place, Poisson arrivals, and each request a step of 1 s: the mean wait is rho / (2 (1 - rho))."""
    found = run(ONE_PLACE, 0.6, 40_000, "round-robin", 1)
    wait = sum(found.end_to_end) / len(found.end_to_end) - 1
    assert wait == pytest.approx(0.6 / (2 * 0.4), rel=0.05)
    assert found.busy == pytest.approx(0.6, rel=0.02)


def test_random_arrivals_split_into_queues_of_their_own() -> None:
    alone = run(ONE_PLACE, 0.6, 40_000, "round-robin", 1)
    split = run(ONE_PLACE, 3.0, 8000, "random", 5)
    assert sum(split.end_to_end) / len(split.end_to_end) == pytest.approx(
        sum(alone.end_to_end) / len(alone.end_to_end), rel=0.06
    )


def test_who_looks_at_connections_or_takes_turns_waits_less_than_chance() -> None:
    turns, least, chance = (
        quantile(run(ONE_PLACE, 3.5, 2500, routing, 5).end_to_end, 0.99)
        for routing in ("round-robin", "least-connections", "random")
    )
    assert max(turns, least) < 0.7 * chance


@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_comes_ends_once_and_the_same_seed_gives_the_same(routing: str) -> None:
    first, again = (run(ONE_PLACE, 3.5, 500, routing, 5) for _ in range(2))
    sent = sum(1 for call in poisson_until(3.5, 500))
    assert first.requests == sent and first.refused == 0
    assert first == again
    assert run(ONE_PLACE, 3.5, 500, routing, 5, seed=1) != first


def poisson_until(rate: float, seconds: float) -> Iterator[Call]:
    for call in poisson(rate, 0):
        if call.at >= ticks(seconds):
            return
        yield call


def test_a_closed_loop_never_has_more_at_once_than_its_users() -> None:
    costs = Costs(
        Settings(10**6, 10**6, 100, max_running_requests=4), base=((0, 1.0),), prefill=0.0
    )
    calls = (Call(0, 10, 5, 5) for _ in count())
    found = simulate(
        costs, [FULL], Closed(calls, 3, 100), Window(0, 100), replicas=1, routing="round-robin"
    )
    # Five steps each; and, but for the first, one that was under way as it came.
    assert set(found.end_to_end) == {5.0, 6.0} and found.answers == 3 * (100 // 6)
    assert found.output_tokens_per_second == pytest.approx(3 * 5 / 6, rel=0.02)


def test_tokens_count_in_the_window_in_which_they_come() -> None:
    costs = Costs(Settings(10**6, 10**6, 100), base=((0, 1.0),), prefill=0.0)
    found = simulate(
        costs,
        [FULL],
        Open(iter([Call(0, 10, 10, 10)]), 100),
        Window(2, 5),
        replicas=1,
        routing="round-robin",
    )
    # Tokens come at 1, 2 .. 10 s; the request came before the window and ended behind it.
    assert (found.output_tokens, found.answers, found.requests) == (3, 0, 0)


def test_refused_requests_are_late() -> None:
    costs = Costs(
        Settings(10**6, 10**6, 100, max_running_requests=1, max_queued_requests=1),
        base=((0, 1.0),),
        prefill=0.0,
    )
    calls = iter([Call(n, 10, 1, 1) for n in range(4)])
    found = simulate(costs, [FULL], Open(calls, 1), Window(0, 1), replicas=1, routing="round-robin")
    assert (found.refused, found.late(10, None), found.late(1.5, None)) == (2, 0.5, 0.75)


def test_maglev_gives_each_replica_its_share_and_moves_few_slots() -> None:
    table, more = maglev(10, 4099), maglev(11, 4099)
    shares = Counter(table)
    assert set(shares.values()) <= {409, 410}
    moved = sum(a != b for a, b in zip(table, more, strict=True)) / 4099
    assert 1 / 11 <= moved < 0.25  # nearly all would move by a hash modulo the replicas


def test_a_prefix_keeps_its_replica_until_that_one_has_more_than_its_share() -> None:
    router = ByPrefix(10, 0)
    call = Call(0, 1, 1, 1, talk=7)
    named = router.pick(call)
    # 1.5 x 2 open calls / 10 replicas, rounded up, is a slot: one beyond it is let in.
    assert router.pick(call) == named
    other = router.pick(call)
    assert other != named
    router.ended(named)
    assert router.pick(call) == named


def test_calls_without_a_prefix_go_in_turns() -> None:
    router = ByPrefix(3, 0)
    assert [router.pick(Call(0, 1, 1, 1)) for _ in range(4)] == [0, 1, 2, 0]


def test_least_connections_takes_any_of_those_with_the_fewest() -> None:
    router = LeastConnections(3, 0)
    call = Call(0, 1, 1, 1)
    assert {router.pick(call) for _ in range(3)} == {0, 1, 2}
    router.ended(1)
    assert router.pick(call) == 1
    firsts = {LeastConnections(3, seed).pick(call) for seed in range(20)}
    assert firsts == {0, 1, 2}


def test_quantiles_are_linear_between_ranks() -> None:
    from array import array

    values = array("d", [4.0, 1.0, 3.0, 2.0])
    assert (quantile(values, 0), quantile(values, 0.5), quantile(values, 1)) == (1.0, 2.5, 4.0)
    assert ticks(1) == TICKS
