"""Which bands of layers and which pairs tell needed tokens from others on this model, if any do.

Half of the traces select: what stands out there from what the same search finds under turned
labels, taking the largest over all layers, pairs and signs each time, so that a search among many
finds nothing by being large. The other half judges what was selected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epikv.calibrate.separation import Case, Chance, Measured, by_chance, measure
from epikv.calibrate.signals import Floats, pairs

ERROR = 0.05  # how often a search may find something where there is nothing
TURNS = 999
RESAMPLES = 2000
CANDIDATES = 4  # pairs that are judged by the other half


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
class Interval:
    """A mean over traces, with its 95 % bootstrap interval over traces."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Band:
    """A run of neighbouring layers in which needed tokens all move more (sign 1) or less (-1)."""

    first: int
    last: int
    sign: int
    representative: int
    weight: float  # mean distance of its layers' AUC from 1/2, on the selection half
    p: float  # the representative's, corrected for the search
    selected: Interval  # AUC, mean over the band's layers; z-scores
    held_out: Interval

    @property
    def accepted(self) -> bool:
        return _beyond(self.held_out, 0.5, self.sign)


@dataclass(frozen=True)
class Pair:
    """score = sign * (Z_a - Z_b)"""

    a: int
    b: int
    sign: int
    p: float  # corrected for the search
    share: float  # of candidates that are kept: the recall of random eviction
    recall: Interval  # on the selection half, which ranks
    auc: Interval
    held_out_recall: Interval
    held_out_gain: Interval  # recall over that of random eviction
    held_out_auc: Interval

    @property
    def accepted(self) -> bool:
        return _beyond(self.held_out_auc, 0.5, 1) and _beyond(self.held_out_gain, 0.0, 1)


@dataclass(frozen=True)
class Search:
    """What was found; `bands` and `pairs` hold only what the held-out half accepted."""

    traces: tuple[int, int]  # that counted, in the selection half and in the other
    tokens: int  # candidates of all these
    needed: float  # their share among them
    bands: list[Band]  # at most one of either sign
    pairs: list[Pair]  # best first
    rejected_bands: list[Band]
    rejected_pairs: list[Pair]
    layers: list[dict[str, object]]  # of every layer but the last: what was measured
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


def search(cases: Sequence[Case], rule: Rule = Rule()) -> Search:
    """Selects on every other trace of each task, and judges on the rest.

    Raises CalibrationError if there are no pairs, or too few traces have needed tokens and others.
    """
    if cases and len(cases[0].steps) < 2:
        raise CalibrationError("a pair takes a model of three layers: the last is not to be had")
    usable = [case for case in cases if case.usable(rule.least)]
    halves: tuple[list[Case], list[Case]] = ([], [])
    for task in dict.fromkeys(case.task for case in usable):
        for number, case in enumerate(case for case in usable if case.task == task):
            halves[number % 2].append(case)
    counts = (len(halves[0]), len(halves[1]))
    if min(counts) < rule.least_traces:
        raise CalibrationError(
            f"{len(usable)} of {len(cases)} traces have {rule.least} candidates for eviction that"
            f" are needed and {rule.least} that are not; it takes {2 * rule.least_traces}"
        )
    selection, held_out = (measure(half, rule.window) for half in halves)
    chance = by_chance(halves[0], rule.window, TURNS, rule.seed)
    p_layers, p_pairs, threshold = corrected(selection, chance)

    bands = [
        band
        for sign in (1, -1)
        if (band := _band(selection, held_out, p_layers, sign, rule.seed)) is not None
    ]
    chosen = _pairs(selection, held_out, p_pairs, rule.seed)
    tokens = np.concatenate([case.needed for case in usable])
    return Search(
        traces=counts,
        tokens=len(tokens),
        needed=float(tokens.mean()),
        bands=[band for band in bands if band.accepted],
        pairs=[pair for pair in chosen if pair.accepted],
        rejected_bands=[band for band in bands if not band.accepted],
        rejected_pairs=[pair for pair in chosen if not pair.accepted],
        layers=_table(selection, held_out, p_layers, rule.seed),
        threshold=threshold,
        best_p=float(min(p_layers.min(), p_pairs.min())),
    )


def corrected(selection: Measured, chance: Chance) -> tuple[Floats, Floats, float]:
    """p of every layer's AUC and of every pair's and sign's recall, and the distance from chance
    that is significant: all against the largest distance that a turn brings anywhere."""
    layers, layers_chance = _standardised(selection.z, chance.z)
    recall, recall_chance = _standardised(selection.recall, chance.recall)
    largest = np.maximum(np.abs(layers_chance).max(1), recall_chance.max(1))

    def p(distances: Floats) -> Floats:
        return (1 + (largest >= distances[:, None]).sum(1)) / (1 + len(largest))

    return p(np.abs(layers)), p(recall), float(np.quantile(largest, 1 - ERROR))


def intervals(values: Floats, seed: int) -> list[Interval]:
    """Of each column's mean over rows. [N, n]"""
    count = len(values)
    draw = np.random.default_rng(seed)
    times = draw.multinomial(count, np.full(count, 1 / count), RESAMPLES)
    low, high = np.quantile(times @ values / count, (0.025, 0.975), axis=0)
    return [Interval(*map(float, three)) for three in zip(values.mean(0), low, high, strict=True)]


def _standardised(values: Floats, chance: Floats) -> tuple[Floats, Floats]:
    """The mean over traces [n], and chance [S, n], in standard deviations of chance from its mean."""
    centre, spread = chance.mean(0), chance.std(0)
    spread = np.where(spread > 1e-9, spread, np.inf)  # what never changes shows nothing
    return (values.mean(0) - centre) / spread, (chance - centre) / spread


def _band(selection: Measured, held_out: Measured, p: Floats, sign: int, seed: int) -> Band | None:
    """The run of significant layers of one sign with the largest sum of distances from 1/2.

    A run of one layer is one: that it is no accident is what the correction sees to.
    """
    found = intervals(selection.z, seed)
    distance = sign * (selection.z.mean(0) - 0.5)
    good = [p[l] <= ERROR and _beyond(found[l], 0.5, sign) for l in range(len(found))]
    runs = _runs(good)
    if not runs:
        return None
    first, last = max(runs, key=lambda run: distance[run[0] : run[1] + 1].sum())
    middle = (first + last) / 2
    representative = max(
        range(first, last + 1), key=lambda l: (round(distance[l], 6), -abs(l - middle))
    )
    band = slice(first, last + 1)
    return Band(
        first=first,
        last=last,
        sign=sign,
        representative=representative,
        weight=float(distance[band].mean()),
        p=float(p[representative]),
        selected=intervals(selection.z[:, band].mean(1, keepdims=True), seed)[0],
        held_out=intervals(held_out.z[:, band].mean(1, keepdims=True), seed)[0],
    )


def _runs(good: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours that are True."""
    edges = np.flatnonzero(np.diff([False, *good, False]))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _pairs(selection: Measured, held_out: Measured, p: Floats, seed: int) -> list[Pair]:
    """The significant pairs with the best recall."""
    count = selection.recall.shape[1] // 2
    every = [(a, b, sign) for sign in (1, -1) for a, b in pairs(selection.z.shape[1])]
    recall = selection.recall.mean(0)
    best = [i for i in np.argsort(-recall, kind="stable") if p[i] <= ERROR][:CANDIDATES]
    result = []
    for i in best:
        a, b, sign = every[i]

        def signed_auc(half: Measured, i: int = i, sign: int = sign) -> Interval:
            values = half.pair[:, [i % count]]
            return intervals(values if sign > 0 else 1 - values, seed)[0]

        result.append(
            Pair(
                a=a,
                b=b,
                sign=sign,
                p=float(p[i]),
                share=float(selection.share.mean()),
                recall=intervals(selection.recall[:, [i]], seed)[0],
                auc=signed_auc(selection),
                held_out_recall=intervals(held_out.recall[:, [i]], seed)[0],
                held_out_gain=intervals(held_out.recall[:, [i]] - held_out.share[:, None], seed)[0],
                held_out_auc=signed_auc(held_out),
            )
        )
    return result


def _table(
    selection: Measured, held_out: Measured, p: Floats, seed: int
) -> list[dict[str, object]]:
    """By layer: AUC of each variant, all traces together, and p of the one that serves."""
    names = ("raw", "mean", "z", "z_in_place")
    columns = {
        name: intervals(np.concatenate([getattr(selection, name), getattr(held_out, name)]), seed)
        for name in names
    }
    return [
        {"layer": l, "p": float(p[l]), **{f"auc_{name}": columns[name][l] for name in names}}
        for l in range(len(p))
    ]


def _beyond(interval: Interval, bound: float, sign: int) -> bool:
    """Whether all of it lies above (sign 1) or below (-1) the bound."""
    return interval.low > bound if sign > 0 else interval.high < bound
