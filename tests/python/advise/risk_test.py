"""Certificates are wrong as rarely as they say, and come as soon as they can."""

import random
from math import ceil, log

import pytest
from epikv.advise.risk import Wager, certified, problems_without_loss

REPETITIONS = 1000


def drawn(dice: random.Random, mean: float, gains: float) -> float:
    """A loss of 1, of -1, or none."""
    at = dice.random()
    return 1.0 if at < mean + gains else -1.0 if at < mean + 2 * gains else 0.0


@pytest.mark.parametrize(("most", "gains"), [(0.02, 0.0), (0.02, 0.02), (0.1, 0.05)])
def test_what_loses_more_is_rarely_certified_whenever_one_looks(most: float, gains: float) -> None:
    wrong = 0
    for repetition in range(REPETITIONS):
        dice = random.Random(f"{most}/{gains}/{repetition}")
        wager = Wager(most)
        for _ in range(400):
            wager.add(drawn(dice, 1.01 * most, gains))
        wrong += wager.certified(0.95)  # at any look
    assert 0 < wrong <= 0.05 * REPETITIONS


def test_what_loses_nothing_is_certified_soon() -> None:
    """The exact binomial test needs log(.05) / log(.98) = 149 problems."""
    exact = ceil(log(0.05) / log(0.98))
    assert exact <= problems_without_loss(0.02, 0.95) <= 1.2 * exact


def test_what_was_explored_only_chooses_the_bets() -> None:
    wager = Wager(0.05, prior=[0.0] * 64)
    assert not wager.certified(0.95) and wager.best == 0
    hopeless = Wager(0.05, prior=[1.0] * 64)
    for _ in range(50):
        hopeless.add(0.0)
    assert not hopeless.certified(0.95), "nothing was bet"


def test_losses_of_all_kinds_leave_some_capital() -> None:
    wager = Wager(0.02, prior=[0.0] * 64)
    for _ in range(500):
        wager.add(1.0)
    assert wager.best == 0 and not wager.certified(0.5)


@pytest.mark.parametrize(("most", "least"), [(1.0, -1.0), (-0.1, 0.0)])
def test_impossible_bounds_are_refused(most: float, least: float) -> None:
    with pytest.raises(ValueError, match="is allowed where losses are in"):
        Wager(most, least)


def test_a_chain_ends_at_the_first_that_fails() -> None:
    sure, unsure = Wager(0.5), Wager(0.5)
    for _ in range(20):
        sure.add(0.0)
    assert certified([sure, sure, unsure, sure], 0.95) == 2
    assert certified([unsure, sure], 0.95) == 0
