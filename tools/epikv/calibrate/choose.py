"""Which bands of layers and which pairs tell needed tokens from others on this model, if any do.

Half of the traces select: what stands out there from what the same search finds under turned
labels, taking the largest over all layers, pairs and signs each time, so that a search among many
finds nothing by being large. The other half judges what was selected.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from epikv.calibrate.findings import Band, CalibrationError, Pair, Rule, Search, beyond
from epikv.calibrate.separation import Case, Chance, Measured, by_chance, measure
from epikv.calibrate.signals import Floats, pairs
from epikv.stats import RESAMPLES, Estimate

ERROR = 0.05  # how often a search may find something where there is nothing
TURNS = 999
CANDIDATES = 8  # pairs that are judged by the other half, and then run


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
        layers=_layers(selection, held_out, p_layers, rule.seed),
        every_pair=_every_pair(selection, held_out, p_pairs),
        threshold=threshold,
        best_p=float(min(p_layers.min(), p_pairs.min())),
    )


def corrected(selection: Measured, chance: Chance) -> tuple[Floats, Floats, float]:
    """p of every layer's AUC and of every pair's and sign's recall, and the distance from chance
    that is significant: all against the largest distance that a turn brings anywhere."""
    layers, layers_chance = _standardised(selection.auc["z"], chance.z)
    recall, recall_chance = _standardised(selection.recall["pair"], chance.recall)
    largest = np.maximum(np.abs(layers_chance).max(1), recall_chance.max(1))

    def p(distances: Floats) -> Floats:
        return (1 + (largest >= distances[:, None]).sum(1)) / (1 + len(largest))

    return p(np.abs(layers)), p(recall), float(np.quantile(largest, 1 - ERROR))


def intervals(values: Floats, seed: int) -> list[Estimate]:
    """Of each column's mean over rows. [N, n]"""
    count = len(values)
    low, high = np.quantile(_resamples(count, seed) @ values / count, (0.025, 0.975), axis=0)
    return [Estimate(*map(float, three)) for three in zip(values.mean(0), low, high, strict=True)]


@lru_cache(maxsize=4)
def _resamples(count: int, seed: int) -> NDArray[np.int64]:
    """How often each of `count` rows is drawn. [RESAMPLES, count]"""
    draw = np.random.default_rng(seed)
    return draw.multinomial(count, np.full(count, 1 / count), RESAMPLES)


def _standardised(values: Floats, chance: Floats) -> tuple[Floats, Floats]:
    """The mean over traces [n], and chance [S, n], in standard deviations of chance from its mean."""
    centre, spread = chance.mean(0), chance.std(0)
    spread = np.where(spread > 1e-9, spread, np.inf)  # what never changes shows nothing
    return (values.mean(0) - centre) / spread, (chance - centre) / spread


def _band(selection: Measured, held_out: Measured, p: Floats, sign: int, seed: int) -> Band | None:
    """The run of significant layers of one sign with the largest sum of distances from 1/2.

    A run of one layer is one: that it is no accident is what the correction sees to.
    """
    selected, judged = selection.auc["z"], held_out.auc["z"]
    found = intervals(selected, seed)
    distance = sign * (selected.mean(0) - 0.5)
    good = [p[n] <= ERROR and beyond(found[n], 0.5, sign) for n in range(len(found))]
    runs = _runs(good)
    if not runs:
        return None
    first, last = max(runs, key=lambda run: distance[run[0] : run[1] + 1].sum())
    middle = (first + last) / 2
    representative = max(
        range(first, last + 1), key=lambda n: (round(distance[n], 6), -abs(n - middle))
    )
    band = slice(first, last + 1)
    return Band(
        first=first,
        last=last,
        sign=sign,
        representative=representative,
        weight=float(distance[band].mean()),
        p=float(p[representative]),
        selected=intervals(selected[:, band].mean(1, keepdims=True), seed)[0],
        held_out=intervals(judged[:, band].mean(1, keepdims=True), seed)[0],
    )


def _runs(good: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours that are True."""
    edges = np.flatnonzero(np.diff([False, *good, False]))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _pairs(selection: Measured, held_out: Measured, p: Floats, seed: int) -> list[Pair]:
    """The significant pairs with the best recall, of equals those with the best AUC."""
    every = _signed(selection)
    selected, judged = selection.recall["pair"], held_out.recall["pair"]
    auc = selection.auc["pair"].mean(0)
    order = np.lexsort((np.concatenate([-auc, auc - 1]), -selected.mean(0).round(9)))
    result = []
    for i in [i for i in order if p[i] <= ERROR][:CANDIDATES]:
        a, b, sign = every[i]

        def signed_auc(half: Measured, i: int = i, sign: int = sign) -> Estimate:
            column = half.auc["pair"][:, [i % (len(every) // 2)]]
            return intervals(column if sign > 0 else 1 - column, seed)[0]

        result.append(
            Pair(
                a=a,
                b=b,
                sign=sign,
                p=float(p[i]),
                share=float(selection.share.mean()),
                recall=intervals(selected[:, [i]], seed)[0],
                auc=signed_auc(selection),
                held_out_recall=intervals(judged[:, [i]], seed)[0],
                held_out_gain=intervals(judged[:, [i]] - held_out.share[:, None], seed)[0],
                held_out_auc=signed_auc(held_out),
                recall_by_task={
                    task: float(judged[held_out.of(task), i].mean())
                    for task in dict.fromkeys(held_out.tasks)
                },
            )
        )
    return result


def _signed(measured: Measured) -> list[tuple[int, int, int]]:
    """Pairs and signs, as columns of their recall have them."""
    layers = measured.auc["z"].shape[1]
    return [(a, b, sign) for sign in (1, -1) for a, b in pairs(layers)]


def _layers(
    selection: Measured, held_out: Measured, p: Floats, seed: int
) -> list[dict[str, object]]:
    """By layer: AUC and recalls of each variant, all traces together, and p of the one that serves."""
    table: list[dict[str, object]] = [
        {"layer": layer, "p": float(value)} for layer, value in enumerate(p)
    ]
    for name in ("raw", "mean", "z", "z_in_place"):
        auc = intervals(_both(selection.auc, held_out.auc, name), seed)
        recall = intervals(_both(selection.recall, held_out.recall, name), seed)
        for layer, row in enumerate(table):
            row[f"auc_{name}"] = auc[layer]
            row[f"recall_of_highest_{name}"] = recall[layer]
            row[f"recall_of_lowest_{name}"] = recall[layer + len(p)]
    return table


def _every_pair(selection: Measured, held_out: Measured, p: Floats) -> list[dict[str, object]]:
    recall = _both(selection.recall, held_out.recall, "pair").mean(0)
    auc = _both(selection.auc, held_out.auc, "pair").mean(0)
    auc = np.concatenate([auc, 1 - auc])
    table: list[dict[str, object]] = [
        {"a": a, "b": b, "sign": sign, "recall": r, "auc": u, "p": q}
        for (a, b, sign), r, u, q in zip(
            _signed(selection), recall.tolist(), auc.tolist(), p.tolist(), strict=True
        )
    ]
    return [table[i] for i in np.argsort(-recall, kind="stable")]


def _both(selection: Mapping[str, Floats], held_out: Mapping[str, Floats], name: str) -> Floats:
    return np.concatenate([selection[name], held_out[name]])
