"""Intervals and tests against figures from elsewhere."""

import random

import pytest
from epikv.stats import Estimate, bootstrap, difference, sign_test, wilson


def test_wilson_is_that_of_the_tables() -> None:
    """Newcombe 1998, table I: Wilson's method without continuity correction."""
    for hits, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        share = wilson(hits, count)
        assert share.value == hits / count
        assert (share.low, share.high) == pytest.approx((low, high), abs=5e-5)
    assert 0 <= wilson(0, 20).low < 1e-12
    assert 1 - 1e-12 < wilson(20, 20).high <= 1


def test_the_sign_test_is_mcnemars() -> None:
    """Of 12 discordant pairs, 10 one way: 2 (1 + 12 + 66) / 4096."""
    more = [1] * 10 + [0] * 2 + [1] * 30 + [0] * 8
    less = [0] * 10 + [1] * 2 + [1] * 30 + [0] * 8
    assert sign_test(more, less) == sign_test(less, more) == pytest.approx(2 * 79 / 4096)
    assert sign_test(more, more) == 1
    assert sign_test([1] * 2000, [0] * 2000) < 1e-300 or sign_test([1] * 2000, [0] * 2000) == 0
    assert sign_test([0.5, 1, 0.25], [0, 0.75, 0]) == 0.25


def test_a_difference_covers_the_truth_as_often_as_it_says() -> None:
    """Pairs are correlated; their interval is narrower than that of two separate means."""
    rng, covered, trials = random.Random(1), 0, 200
    for _ in range(trials):
        hard = [rng.random() for _ in range(120)]
        more = [int(rng.random() < 0.9 * (1 - h) + 0.1) for h in hard]
        less = [int(rng.random() < 0.9 * (1 - h)) for h in hard]
        gain = difference(more, less)
        covered += gain.low <= 0.1 <= gain.high
    assert 0.9 <= covered / trials <= 0.99
    assert gain == difference(more, less)
    assert difference([1, 1, 1], [0, 0, 0]) == Estimate(1, 1, 1)


def test_bootstrap_brackets_the_statistic() -> None:
    estimate = bootstrap([float(i) for i in range(101)])
    assert estimate.value == 50 and 35 < estimate.low < 50 < estimate.high < 65
    assert bootstrap([float(i) for i in range(101)]) == estimate
    pairs = [(2.0 * i, float(i)) for i in range(1, 50)]
    ratio = bootstrap(pairs, lambda s: sum(a for a, _ in s) / sum(b for _, b in s))
    assert ratio == Estimate.exact(2.0)
