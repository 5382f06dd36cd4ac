"""What a search for layers goes by and what it finds. Intervals are 95 %, over traces."""

from dataclasses import dataclass
from typing import Any

from epikv.stats import Estimate


class CalibrationError(Exception):
    """Nothing can be chosen; the message says why."""


@dataclass(frozen=True)
class Rule:
    """What a search goes by."""

    window: int = 64  # tokens of the rolling z-score
    least: int = 10  # needed tokens, and others, that a trace must have to count
    least_traces: int = 8  # in each half
    seed: int = 0


@dataclass(frozen=True)
class Band:
    """A run of neighbouring layers in which needed tokens all move more (sign 1) or less (-1)."""

    first: int
    last: int
    sign: int
    representative: int
    weight: float  # mean distance of its layers' AUC from 1/2, on the selection half
    p: float  # the representative's, corrected for the search
    selected: Estimate  # AUC, mean over the band's layers; z-scores
    held_out: Estimate

    @property
    def accepted(self) -> bool:
        return beyond(self.held_out, 0.5, self.sign)


@dataclass(frozen=True)
class Pair:
    """score = sign * (Z_a - Z_b)"""

    a: int
    b: int
    sign: int
    p: float  # corrected for the search
    share: float  # of candidates that are kept: the recall of random eviction
    recall: Estimate  # on the selection half, which ranks
    auc: Estimate
    held_out_recall: Estimate
    held_out_gain: Estimate  # recall over that of random eviction
    held_out_auc: Estimate
    recall_by_task: dict[str, float]  # on the held-out half

    @property
    def accepted(self) -> bool:
        return beyond(self.held_out_auc, 0.5, 1) and beyond(self.held_out_gain, 0.0, 1)


@dataclass(frozen=True)
class Search:
    """What was found; `bands` and `pairs` hold only what the held-out half accepted."""

    traces: tuple[int, int]  # that counted, in the selection half and in the other
    tokens: int  # candidates of those that counted
    needed: float  # their share among them
    bands: list[Band]  # at most one of either sign
    pairs: list[Pair]  # best first
    rejected_bands: list[Band]
    rejected_pairs: list[Pair]
    layers: list[dict[str, Any]]  # of every layer but the last: what was measured
    every_pair: list[dict[str, Any]]  # with both signs, on all traces, best first
    threshold: float  # standard deviations of chance that a finding must be away from it
    best_p: float  # corrected, of the layer or pair that stood out most

    def why_nothing(self) -> str:
        """Where no pair was accepted."""
        if not self.rejected_pairs:
            return (
                "no pair of layers tells needed tokens from others better than turned labels let"
                f" expect (the best finding has p = {self.best_p:.3f}, corrected for the search)"
            )
        told = "; ".join(
            f"layers {p.a}, {p.b}, sign {p.sign:+d}: AUC {p.held_out_auc.low:.3f} to"
            f" {p.held_out_auc.high:.3f}, recall over random {p.held_out_gain.low:+.3f} to"
            f" {p.held_out_gain.high:+.3f}"
            for p in self.rejected_pairs
        )
        return f"on the held-out half the intervals of all that was selected reach chance ({told})"


def beyond(interval: Estimate, bound: float, sign: int) -> bool:
    """Whether all of it lies above (sign 1) or below (-1) the bound."""
    return interval.low > bound if sign > 0 else interval.high < bound
