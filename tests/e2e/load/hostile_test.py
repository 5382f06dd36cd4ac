"""The hostile hour's figures: what does not hold is told."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hostile"))

from figures import Answer, Comparison, Kind, Phase, percentile


def phase(ttfts: list[float], lost: int = 0, wrong: int = 0) -> Phase:
    """Of ten seconds."""
    answers = [Answer(0, ttft, "OK", number >= wrong) for number, ttft in enumerate(ttfts)]
    return Phase(10, [*answers, *(Answer(0, None, "UNAVAILABLE", True),) * lost])


ALONE = phase([0.1] * 100)


def with_alone(*attacked: Phase) -> Comparison:
    return Comparison({Kind.ALONE: [ALONE], Kind.DECOY: [], Kind.ATTACKED: attacked})


def test_p99_is_of_99_in_100() -> None:
    assert percentile([float(n) for n in range(1, 101)], 99) == 99
    assert percentile([1.0], 99) == 1
    assert percentile([], 99) == math.inf


def test_what_holds_is_no_failure() -> None:
    held = with_alone(phase([0.1] * 98 + [0.19, 0.9]))
    assert held.failures() == []
    assert held.goodput_ratio == 1
    assert held.ttft_ratio == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("attacked", "told"),
    [
        (phase([0.1] * 94, lost=6), "goodput under attack is 0.940"),
        (phase([0.1] * 98 + [0.2, 0.2]), "2.00 times what it is alone"),
        (phase([0.1] * 100, wrong=1), "1 answers have wrong bytes"),
    ],
)
def test_what_does_not_hold_is_told(attacked: Phase, told: str) -> None:
    [failure] = with_alone(attacked).failures()
    assert told in failure


def test_phases_count_by_their_length() -> None:
    long, short = Phase(30, ALONE.answers * 3), Phase(10, [])
    assert with_alone(long, short).goodput_ratio == pytest.approx(0.75)
