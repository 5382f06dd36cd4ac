"""The hostile hour's figures: what does not hold is told."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hostile"))

from figures import Answer, Comparison, Phase, p99


def phase(attacked: bool, ttfts: list[float], lost: int = 0, wrong: int = 0) -> Phase:
    """Of ten seconds."""
    answers = [Answer(0, ttft, "OK", number >= wrong) for number, ttft in enumerate(ttfts)]
    return Phase(attacked, 10, [*answers, *(Answer(0, None, "UNAVAILABLE", True),) * lost])


ALONE = phase(False, [0.1] * 100)


def test_p99_is_of_99_in_100() -> None:
    assert p99([float(n) for n in range(1, 101)]) == 99
    assert p99([1.0]) == 1
    assert p99([]) == math.inf


def test_what_holds_is_no_failure() -> None:
    held = Comparison([ALONE], [phase(True, [0.1] * 98 + [0.19, 0.9])])
    assert held.failures() == []
    assert held.goodput_ratio == 1
    assert held.ttft_ratio == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("attacked", "told"),
    [
        (phase(True, [0.1] * 94, lost=6), "goodput under attack is 0.940"),
        (phase(True, [0.1] * 98 + [0.2, 0.2]), "2.00 times what it is alone"),
        (phase(True, [0.1] * 100, wrong=1), "1 answers have wrong bytes"),
    ],
)
def test_what_does_not_hold_is_told(attacked: Phase, told: str) -> None:
    [failure] = Comparison([ALONE], [attacked]).failures()
    assert told in failure


def test_phases_count_by_their_length() -> None:
    long, short = Phase(True, 30, ALONE.answers * 3), Phase(True, 10, [])
    assert Comparison([ALONE], [long, short]).goodput_ratio == pytest.approx(0.75)
